//! How the driver spells what it was told; tests/conformance/scenarios/README.md has the forms.

use std::fmt::Write;

use kvgrpc::pb::{self, RankId, RankRow, Role};
use kvgrpc::Refusal;
use serde::Deserialize;

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct Row {
    engine: String,
    role: String,
    epoch: String,
    grpc: String,
    dp: u32,
    dp_size: Option<u32>,
    model: String,
}

impl Row {
    pub fn message(&self) -> RankRow {
        let rank = RankId { engine: self.engine.clone(), dp: self.dp, ..Default::default() };
        RankRow {
            rank: Some(pb::RankRef { rank: Some(rank), epoch: crate::number(&self.epoch) }),
            role: role_of(&self.role).into(),
            endpoints: Some(pb::Endpoints { grpc: self.grpc.clone(), ..Default::default() }),
            layout: Some(pb::Layout { dp: self.dp_size.unwrap_or(1), pp: 1, cp: 1, tp: 1 }),
            data_plane: "shm".to_owned(),
            model: Some(pb::ModelIdentity { name: self.model.clone(), ..Default::default() }),
            ..Default::default()
        }
    }
}

pub fn role_of(name: &str) -> Role {
    Role::from_str_name(&format!("ROLE_{name}")).expect("the scenario names a role")
}

pub fn head(engine: &pb::Engine) -> String {
    let readiness = if engine.ready { "ready" } else { "waiting" };
    format!("{} {}/{} {readiness}", engine.name, engine.registered_ranks, engine.expected_ranks)
}

pub fn engine(engine: &pb::Engine) -> String {
    let role = engine.role().as_str_name().trim_start_matches("ROLE_");
    let told = head(engine);
    let rows = engine.rows.iter().filter_map(|row| row.rank.as_ref());
    let rows = joined(rows.map(|rank| format!("{}@{}", at(&rank.rank.clone().unwrap_or_default()), rank.epoch)), ",");
    let missing = joined(engine.missing_ranks.iter().map(at), ",");
    format!("{} {role}{} rows={rows} missing={missing}", engine.name, &told[engine.name.len()..])
}

fn at(rank: &RankId) -> String {
    format!("{}.{}.{}.{}", rank.dp, rank.pp, rank.cp, rank.tp)
}

pub fn score(score: &pb::CacheScore) -> String {
    let (device, host, disk) = (score.device_blocks, score.host_blocks, score.disk_blocks);
    let held = format!("device={device} host={host} disk={disk} blocks={}", score.blocks);
    format!("{}/{} {held} page={}", score.engine, score.dp, score.page_tokens)
}

pub fn placement(placement: &pb::Placement) -> String {
    let (device, host, blocks) = (placement.device_blocks, placement.host_blocks, placement.blocks);
    let pull = placement.pull.as_ref().map_or("-", |pull| &pull.engine);
    let held = format!("device={device} host={host} blocks={blocks} page={}", placement.page_tokens);
    format!("{}/{} {held} compute={} pull={pull}", placement.engine, placement.dp, placement.compute_tokens)
}

pub fn lookup(found: &pb::LookupResponse) -> String {
    let (asked, device, host) = (found.asked_pages, found.device_pages, found.host_pages);
    format!("asked={asked} device={device} host={host} storage={} page={}", found.storage_pages, found.page_tokens)
}

pub fn operation(operation: &pb::CacheOperation) -> String {
    let state = operation.state().as_str_name().trim_start_matches("OPERATION_STATE_");
    let stop = match operation.stop() {
        pb::OperationStop::Unspecified => "-",
        stop => stop.as_str_name().trim_start_matches("OPERATION_STOP_"),
    };
    let (asked, covered, completed) = (operation.asked_pages, operation.covered_pages, operation.completed_pages);
    let counts = format!("asked={asked} covered={covered} completed={completed}");
    format!("{state} stop={stop} {counts} quiescent={}", operation.quiescent)
}

pub fn refusal(refusal: &Refusal) -> String {
    let reason = refusal.reason.as_str_name().trim_start_matches("ERROR_REASON_");
    let retry = refusal.retry_after.map_or_else(|| "-".to_owned(), |after| after.as_millis().to_string());
    let mut line = format!("refused {} {reason} retry={retry} repeat={}", upper(refusal.code), refusal.may_repeat());
    let mut metadata: Vec<_> = refusal.metadata.iter().collect();
    metadata.sort();
    for (key, value) in metadata {
        let _ = write!(line, " {key}={value}");
    }
    line
}

/// Spells a code as the protocol does: NotFound is NOT_FOUND.
fn upper(code: tonic::Code) -> String {
    let mut spelled = String::new();
    for (position, letter) in format!("{code:?}").char_indices() {
        if position > 0 && letter.is_uppercase() {
            spelled.push('_');
        }
        spelled.extend(letter.to_uppercase());
    }
    spelled
}

pub fn joined(parts: impl Iterator<Item = String>, between: &str) -> String {
    let parts: Vec<_> = parts.collect();
    if parts.is_empty() {
        return "-".to_owned();
    }
    parts.join(between)
}
