//! IndexService and ServerService: checks what was asked, asks the index.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use base64::engine::general_purpose::URL_SAFE;
use base64::Engine;
use kvgrpc::pb::index_service_server::IndexService;
use kvgrpc::pb::score_prompt::Prefix;
use kvgrpc::pb::server_service_server::ServerService;
use kvgrpc::pb::{self, IndexSource, IndexSourceState, PromptScores, ScorePrompt};
use kvgrpc::{ModelNeeded, PlanQuestion, PrefixIndex, Question, Wanted};
use tonic::{Request, Response, Status};

use crate::limits::{is_stream, ByMethod, Limits, Who};
use crate::proof::{Caller, OPERATOR};
use crate::refusals::{denied, disabled, draining, invalid};
use crate::status::Counts;
use crate::turns::{Turn, Turns};

const MAX_PROMPTS: usize = 1024;
const MAX_PLAN_PROMPTS: usize = 256;
const MAX_BLOCKS: usize = 65_536;
const MAX_ENGINES: usize = 1024;
/// Ways to hash one prompt.
const MAX_OTHER_KINDS: usize = 3;
/// A rank has no more.
const MAX_LABELS: usize = 16;
const MAX_NOT_FOLLOWED: usize = 100;
const DEFAULT_PAGE: u32 = 100;
const MAX_PAGE: u32 = 1000;
/// The names of lists in page tokens.
const SOURCES: &str = "sources";
const CALLERS: &str = "callers";
const LONGEST_STALENESS: Duration = Duration::from_secs(86_400);
/// Of all prompts of an answer together: some 4 MiB, which is what clients of any language take.
const MAX_ANSWERS: usize = 65_536;
/// Of one caller that are told.
const MAX_METHODS: usize = 64;
/// How long a piece of an answer may take: others have their turn then.
const LONGEST_PIECE: Duration = Duration::from_millis(2);

/// What both services share.
#[derive(Clone)]
pub struct Index {
    pub index: Arc<PrefixIndex>,
    pub draining: Arc<AtomicBool>,
    /// The process ends: no Undrain takes that back.
    pub ending: Arc<AtomicBool>,
    pub counts: Arc<Counts>,
    pub call_limits: pb::CallLimits,
    pub limits: Limits,
    pub began: SystemTime,
    /// Pieces of answers, as many at a time as there are processors.
    pub turns: Arc<Turns>,
}

/// A piece of an answer, in its caller's turn.
struct Piece {
    _turn: Turn,
    began: Instant,
}

impl Piece {
    fn is_over(&self) -> bool {
        self.began.elapsed() > LONGEST_PIECE
    }
}

impl Index {
    async fn next_piece(&self, caller: &Arc<str>) -> Piece {
        Piece { _turn: self.turns.take(caller).await, began: Instant::now() }
    }

    fn check_open(&self) -> Result<(), Status> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(draining());
        }
        Ok(())
    }
}

#[tonic::async_trait]
impl IndexService for Index {
    async fn score(&self, request: Request<pb::ScoreRequest>) -> Result<Response<pb::ScoreResponse>, Status> {
        let _running = self.counts.score.begin();
        self.check_open()?;
        let caller = caller_of(&request);
        let request = request.into_inner();
        let (wanted, mut left, mut answers) = (wanted(&request)?, MAX_BLOCKS, MAX_ANSWERS);
        let mut prompts = Vec::with_capacity(request.prompts.len());
        let mut piece = self.next_piece(&caller).await;
        for (at, prompt) in request.prompts.into_iter().enumerate() {
            if piece.is_over() {
                drop(piece);
                piece = self.next_piece(&caller).await;
            }
            let question = question(prompt, &format!("prompts[{at}]"), &mut left)?;
            let scores = self
                .index
                .score(&question, &wanted)
                .map_err(|needed| model_needed(&format!("prompts[{at}]"), &needed))?;
            self.counts.prompts.fetch_add(1, Ordering::Relaxed);
            self.counts.misses.fetch_add(scores.is_empty().into(), Ordering::Relaxed);
            take_answers("max_scores", request.max_scores, scores.len(), &mut answers)?;
            prompts.push(PromptScores { scores, blocks: question.hashes.len() as u32 });
        }
        Ok(Response::new(pb::ScoreResponse { prompts }))
    }

    async fn plan(&self, request: Request<pb::PlanRequest>) -> Result<Response<pb::PlanResponse>, Status> {
        let _running = self.counts.plan.begin();
        self.check_open()?;
        let caller = caller_of(&request);
        let request = request.into_inner();
        check_plan(&request)?;
        let staleness = request.max_staleness.map(staleness).transpose()?;
        let (mut left, mut answers, most) = (MAX_BLOCKS, MAX_ANSWERS, request.max_placements.max(1) as usize);
        let mut questions = Vec::with_capacity(request.prompts.len());
        for (at, each) in request.prompts.into_iter().enumerate() {
            let question = question(each.prompt.unwrap_or_default(), &format!("prompts[{at}].prompt"), &mut left)?;
            let mut other_kinds = Vec::with_capacity(each.other_kinds.len());
            for (number, prompt) in each.other_kinds.into_iter().enumerate() {
                let other = self::question(prompt, &format!("prompts[{at}].other_kinds[{number}]"), &mut left)?;
                let (model, labels) = (question.model.clone(), question.labels.clone());
                other_kinds.push(Question { model, labels, ..other });
            }
            if each.tokens == 0 && !other_kinds.is_empty() {
                let rule = "those of the request, where hashes of several kinds name it";
                return Err(invalid(&format!("prompts[{at}].tokens"), "0", rule));
            }
            let (tokens, engines, sources) = (each.tokens.into(), each.engines, each.sources);
            questions.push(PlanQuestion { question, tokens, engines, sources, other_kinds });
        }
        let mut plans = Vec::with_capacity(questions.len());
        let mut planning = self.index.begin_plan(staleness, request.reserve);
        while plans.len() < questions.len() {
            let piece = self.next_piece(&caller).await;
            // One question over many caches takes milliseconds, which are not the other calls'.
            tokio::task::block_in_place(|| {
                while let Some(asked) = questions.get(plans.len()).filter(|_| !piece.is_over()) {
                    let field = || format!("prompts[{}].prompt", plans.len());
                    let mut placements = planning.place(asked).map_err(|needed| model_needed(&field(), &needed))?;
                    placements.truncate(most);
                    take_answers("max_placements", request.max_placements, placements.len(), &mut answers)?;
                    plans.push(pb::PromptPlan { placements, blocks: asked.question.hashes.len() as u32 });
                }
                Ok::<(), Status>(())
            })?;
        }
        planning.keep();
        Ok(Response::new(pb::PlanResponse { plans }))
    }

    async fn list_sources(
        &self,
        request: Request<pb::ListSourcesRequest>,
    ) -> Result<Response<pb::ListSourcesResponse>, Status> {
        self.check_open()?;
        let request = request.into_inner();
        let after = read_place(&request.page_token)?;
        let size = page_size(request.page_size);
        let states = states(&request.states)?;
        let after = after.as_ref().map(|(engine, dp)| (engine.as_str(), *dp));
        let page = self.index.sources_behind(after, &states, size);
        let last = page.sources.last().filter(|_| page.more);
        let place = |source: &IndexSource| format!("{}\0{}", source.engine, source.dp);
        let next_page_token = last.map(|source| page_token(SOURCES, &place(source))).unwrap_or_default();
        let mut not_followed = self.index.not_followed();
        not_followed.truncate(MAX_NOT_FOLLOWED);
        let count = |(state, sources)| pb::IndexSourceStateCount { state, sources };
        let counts = page.counts.into_iter().map(count).collect();
        Ok(Response::new(pb::ListSourcesResponse { sources: page.sources, next_page_token, counts, not_followed }))
    }
}

#[tonic::async_trait]
impl ServerService for Index {
    async fn get_server_info(
        &self,
        _: Request<pb::GetServerInfoRequest>,
    ) -> Result<Response<pb::GetServerInfoResponse>, Status> {
        let limits = pb::IndexLimits {
            max_score_blocks: MAX_BLOCKS as u32,
            max_score_tokens: 0,
            max_score_prompts: MAX_PROMPTS as u32,
            max_plan_prompts: MAX_PLAN_PROMPTS as u32,
        };
        Ok(Response::new(pb::GetServerInfoResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            services: ["kvgrpc.v1.IndexService", "kvgrpc.v1.ServerService"].map(str::to_owned).into(),
            limits: Some(pb::ServerLimits { calls: Some(self.call_limits), index: Some(limits), ..Default::default() }),
            start_time: Some(self.began.into()),
            draining: self.draining.load(Ordering::Relaxed),
            pid: std::process::id(),
            ..Default::default()
        }))
    }

    async fn drain(&self, request: Request<pb::DrainRequest>) -> Result<Response<pb::DrainResponse>, Status> {
        check_operator(&request, "/kvgrpc.v1.ServerService/Drain")?;
        // An index holds nothing that a drain would have to wait for.
        self.draining.store(true, Ordering::Relaxed);
        Ok(Response::new(pb::DrainResponse { drained: true, open_rooms: 0 }))
    }

    async fn undrain(&self, request: Request<pb::UndrainRequest>) -> Result<Response<pb::UndrainResponse>, Status> {
        check_operator(&request, "/kvgrpc.v1.ServerService/Undrain")?;
        if self.ending.load(Ordering::Relaxed) {
            return Err(draining());
        }
        self.draining.store(false, Ordering::Relaxed);
        Ok(Response::new(pb::UndrainResponse {}))
    }

    async fn list_callers(
        &self,
        request: Request<pb::ListCallersRequest>,
    ) -> Result<Response<pb::ListCallersResponse>, Status> {
        check_operator(&request, "/kvgrpc.v1.ServerService/ListCallers")?;
        let request = request.into_inner();
        let after = read_page_token(CALLERS, &request.page_token)?;
        let size = page_size(request.page_size);
        let open = self.limits.open_calls().into_iter();
        let mut callers: Vec<_> = open.filter(|(who, _)| place_of(who) > after).collect();
        let next_page_token =
            if callers.len() > size { page_token(CALLERS, &place_of(&callers[size - 1].0)) } else { String::new() };
        callers.truncate(size);
        let callers = callers.into_iter().map(|(who, open)| caller_to_pb(who, open));
        Ok(Response::new(pb::ListCallersResponse { callers: callers.collect(), next_page_token }))
    }
}

fn check_operator<T>(request: &Request<T>, method: &str) -> Result<(), Status> {
    match request.extensions().get::<Caller>() {
        // No role: nobody has to prove anything here.
        Some(Caller { role, .. }) if !role.is_empty() && role != OPERATOR => Err(denied(method, role, OPERATOR)),
        _ => Ok(()),
    }
}

fn caller_to_pb((name, host, role): Who, open: ByMethod) -> pb::Caller {
    let role = pb::CallerRole::from_str_name(&format!("CALLER_ROLE_{}", role.to_uppercase()));
    let of = |stream: bool| open.iter().filter(|(path, _)| is_stream(path) == stream).map(|(_, open)| open).sum();
    let (open_calls, open_streams) = (of(false), of(true));
    let mut methods: Vec<_> = open.into_iter().map(|(method, open)| pb::OpenMethod { method, open }).collect();
    methods.sort_by_key(|method| std::cmp::Reverse(method.open));
    methods.truncate(MAX_METHODS);
    let role = role.unwrap_or_default().into();
    pb::Caller { name: name.to_string(), role, address: host, open_calls, open_streams, methods, ..Default::default() }
}

fn caller_of<T>(request: &Request<T>) -> Arc<str> {
    request.extensions().get::<Caller>().map_or_else(|| Arc::from(""), |caller| caller.name.clone())
}

/// `most`: of one prompt, as the caller set it. Refuses what would be too many with those of the prompts before.
fn take_answers(field: &str, most: u32, answers: usize, left: &mut usize) -> Result<(), Status> {
    let rule = || format!("so few that an answer has at most {MAX_ANSWERS} in all prompts together");
    *left = left.checked_sub(answers).ok_or_else(|| invalid(field, &most.to_string(), &rule()))?;
    Ok(())
}

fn wanted(request: &pb::ScoreRequest) -> Result<Wanted, Status> {
    let (prompts, engines) = (request.prompts.len(), request.engines.len());
    if !(1..=MAX_PROMPTS).contains(&prompts) {
        return Err(invalid("prompts", &format!("{prompts} of them"), &format!("1 to {MAX_PROMPTS}")));
    }
    if engines > MAX_ENGINES {
        return Err(invalid("engines", &format!("{engines} names"), &format!("at most {MAX_ENGINES}")));
    }
    Ok(Wanted {
        engines: request.engines.clone(),
        most: request.max_scores as usize,
        freshness: request.with_freshness,
        max_staleness: request.max_staleness.map(staleness).transpose()?,
    })
}

fn staleness(written: prost_types::Duration) -> Result<Duration, Status> {
    let seconds = Duration::try_from(written).ok().filter(|staleness| *staleness <= LONGEST_STALENESS);
    seconds.ok_or_else(|| invalid("max_staleness", &format!("{written:?}"), "0 s to 86400 s"))
}

fn check_plan(request: &pb::PlanRequest) -> Result<(), Status> {
    let prompts = request.prompts.len();
    if !(1..=MAX_PLAN_PROMPTS).contains(&prompts) {
        return Err(invalid("prompts", &format!("{prompts} of them"), &format!("1 to {MAX_PLAN_PROMPTS}")));
    }
    for (at, each) in request.prompts.iter().enumerate() {
        for (name, named) in [("engines", &each.engines), ("sources", &each.sources)] {
            if named.len() > MAX_ENGINES {
                let (field, value) = (format!("prompts[{at}].{name}"), format!("{} names", named.len()));
                return Err(invalid(&field, &value, &format!("at most {MAX_ENGINES}")));
            }
        }
        check_other_kinds(each, &format!("prompts[{at}].other_kinds"))?;
    }
    Ok(())
}

/// They are one prompt, for the same caches.
fn check_other_kinds(asked: &pb::PlanPrompt, field: &str) -> Result<(), Status> {
    let (others, nothing) = (&asked.other_kinds, ScorePrompt::default());
    if others.len() > MAX_OTHER_KINDS {
        return Err(invalid(field, &format!("{} of them", others.len()), &format!("at most {MAX_OTHER_KINDS}")));
    }
    let first = asked.prompt.as_ref().unwrap_or(&nothing);
    for (at, other) in others.iter().enumerate() {
        if !other.model.is_empty() && other.model != first.model {
            let rule = format!("empty, or '{}' as of prompt", first.model);
            return Err(invalid(&format!("{field}[{at}].model"), &format!("'{}'", other.model), &rule));
        }
        if !other.labels.is_empty() && other.labels != first.labels {
            return Err(invalid(&format!("{field}[{at}].labels"), "others", "none, or those of prompt"));
        }
    }
    Ok(())
}

fn model_needed(field: &str, needed: &ModelNeeded) -> Status {
    invalid(
        &format!("{field}.model"),
        "''",
        &format!("the model's name: these caches are of {}", needed.models.join(" or ")),
    )
}

fn question(prompt: ScorePrompt, field: &str, left: &mut usize) -> Result<Question, Status> {
    let send_hashes = "send block_hashes, or ask `kvgrpc serve index` without --native";
    let hashes = match prompt.prefix {
        Some(Prefix::BlockHashes(hashes)) => hashes.values,
        Some(Prefix::Sglang(_)) => return Err(disabled("prompts of SGLang tokens", send_hashes)),
        Some(Prefix::Vllm(_)) => return Err(disabled("prompts of vLLM tokens", send_hashes)),
        None => return Err(invalid(&format!("{field}.prefix"), "absent", "one of block_hashes, sglang, vllm")),
    };
    if hashes.len() > *left {
        let (field, value) = (format!("{field}.block_hashes.values"), format!("{} blocks", hashes.len()));
        return Err(invalid(&field, &value, &format!("at most {MAX_BLOCKS} blocks in all prompts together")));
    }
    *left -= hashes.len();
    if prompt.labels.len() > MAX_LABELS {
        let (field, value) = (format!("{field}.labels"), format!("{} of them", prompt.labels.len()));
        return Err(invalid(&field, &value, &format!("at most {MAX_LABELS}")));
    }
    Ok(Question { hashes, model: prompt.model, labels: prompt.labels, ..Question::default() })
}

/// A state that is not known would be in no source's place: the answer would say that no cache is followed.
fn states(asked: &[i32]) -> Result<Vec<IndexSourceState>, Status> {
    let known = || (1..).map_while(|state| IndexSourceState::try_from(state).ok());
    let state = |(at, state): (usize, &i32)| {
        known().find(|each| *each as i32 == *state).ok_or_else(|| {
            let names: Vec<&str> = known().map(|each| each.as_str_name()).collect();
            invalid(&format!("states[{at}]"), &state.to_string(), &format!("one of {}", names.join(", ")))
        })
    };
    asked.iter().enumerate().map(state).collect()
}

fn place_of((name, host, role): &Who) -> String {
    format!("{name}\0{host}\0{role}")
}

fn page_size(asked: u32) -> usize {
    (if asked == 0 { DEFAULT_PAGE } else { asked.min(MAX_PAGE) }) as usize
}

fn page_token(list: &str, after: &str) -> String {
    URL_SAFE.encode(format!("{list}\0{after}"))
}

fn read_page_token(list: &str, token: &str) -> Result<String, Status> {
    if token.is_empty() {
        return Ok(String::new());
    }
    let text = URL_SAFE.decode(token).ok().and_then(|raw| String::from_utf8(raw).ok());
    let of_list = text.as_deref().and_then(|text| text.split_once('\0')).filter(|(name, _)| *name == list);
    of_list.map(|(_, after)| after.to_owned()).ok_or_else(|| not_ours(token))
}

/// The engine and dp to go on behind; None: from the first on.
fn read_place(token: &str) -> Result<Option<(String, u32)>, Status> {
    let after = read_page_token(SOURCES, token)?;
    if after.is_empty() {
        return Ok(None);
    }
    let place = after.rsplit_once('\0').and_then(|(engine, dp)| Some((engine.to_owned(), dp.parse().ok()?)));
    place.map(Some).ok_or_else(|| not_ours(token))
}

fn not_ours(token: &str) -> Status {
    let rule = "a next_page_token of the same list with the same filters, or empty";
    invalid("page_token", &token.chars().take(100).collect::<String>(), rule)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Code;
    use tonic_types::StatusExt;

    #[test]
    fn a_state_that_is_not_known_is_refused_by_its_place() {
        assert!(states(&[]).is_ok() && states(&[1, 2, 3, 4, 5]).is_ok());
        for wrong in [0, 6, -1] {
            let refused = states(&[4, wrong]).unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument);
            let metadata = refused.get_details_error_info().unwrap().metadata;
            assert_eq!((metadata["field"].as_str(), &metadata["value"]), ("states[1]", &wrong.to_string()));
            assert!(metadata["rule"].ends_with("INDEX_SOURCE_STATE_CURRENT, INDEX_SOURCE_STATE_DOUBTFUL"));
        }
    }
}
