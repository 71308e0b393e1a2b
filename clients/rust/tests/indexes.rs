//! Several indexes of one fleet: whoever is away costs a router nothing but what it asked in that moment.

use std::time::{Duration, Instant};

use kvgrpc::pb::index_service_server::{IndexService, IndexServiceServer};
use kvgrpc::pb::{self, CacheScore, PromptScores, ScorePrompt, ScoreRequest};
use kvgrpc::{Dialer, Indexes, Options};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Code, Request, Response, Status};

/// Answers each question with its name, and none that has no prompt.
struct Named(&'static str);

#[tonic::async_trait]
impl IndexService for Named {
    async fn score(&self, request: Request<ScoreRequest>) -> Result<Response<pb::ScoreResponse>, Status> {
        if request.into_inner().prompts.is_empty() {
            return Err(Status::invalid_argument("no prompt"));
        }
        let scores = vec![CacheScore { engine: self.0.to_owned(), ..Default::default() }];
        Ok(Response::new(pb::ScoreResponse { prompts: vec![PromptScores { scores, blocks: 0 }] }))
    }

    async fn plan(&self, _: Request<pb::PlanRequest>) -> Result<Response<pb::PlanResponse>, Status> {
        Err(Status::unimplemented("not asked"))
    }

    async fn list_sources(
        &self,
        _: Request<pb::ListSourcesRequest>,
    ) -> Result<Response<pb::ListSourcesResponse>, Status> {
        Ok(Response::new(pb::ListSourcesResponse::default()))
    }
}

async fn serve(name: &'static str) -> (Dialer, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = tonic::transport::Server::builder().add_service(IndexServiceServer::new(Named(name)));
    // Its connections end with it.
    let serving = tokio::spawn(async move { drop(server.serve_with_incoming(TcpListenerStream::new(listener)).await) });
    (Dialer::new(&address, Options::default()).unwrap(), serving)
}

async fn answered_by(indexes: &Indexes) -> Option<String> {
    let answer =
        indexes.score(ScoreRequest { prompts: vec![ScorePrompt::default()], ..Default::default() }).await.unwrap();
    answer.map(|mut answer| answer.prompts.remove(0).scores.remove(0).engine)
}

/// Nobody listens there.
async fn nobody() -> Dialer {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    Dialer::new(&listener.local_addr().unwrap().to_string(), Options::default()).unwrap()
}

#[tokio::test]
async fn the_next_index_answers_where_one_refuses() {
    let (well, _serving) = serve("well").await;
    let indexes = Indexes::new(&[nobody().await, well]).within(Duration::from_secs(10));
    assert_eq!(answered_by(&indexes).await.as_deref(), Some("well"));
    assert_eq!(answered_by(&indexes).await.as_deref(), Some("well"));
    assert_eq!(indexes.unanswered(), 0);
    let refusal = indexes.score(ScoreRequest::default()).await.unwrap_err();
    assert_eq!(refusal.code, Code::InvalidArgument, "what no index would answer is told");
}

#[tokio::test]
async fn one_that_hangs_costs_one_question_and_is_asked_last() {
    // Takes connections, and says nothing.
    let hanging = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let dialer = Dialer::new(&hanging.local_addr().unwrap().to_string(), Options::default()).unwrap();
    let (well, _serving) = serve("well").await;
    let indexes = Indexes::new(&[dialer, well]).within(Duration::from_secs(1));
    let began = Instant::now();
    assert_eq!(answered_by(&indexes).await, None);
    assert!(began.elapsed() >= Duration::from_millis(900));
    for _ in 0..3 {
        assert_eq!(answered_by(&indexes).await.as_deref(), Some("well"));
    }
    assert_eq!(indexes.unanswered(), 1);
}
