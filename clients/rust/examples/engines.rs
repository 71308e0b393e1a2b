//! Lists the engines of a registry, and what it answers about one that is not there: `engines ADDRESS [SECRET]`.

use kvgrpc::pb::registry_service_client::RegistryServiceClient;
use kvgrpc::{connect, pb, Options, Refusal};

#[tokio::main]
async fn main() -> Result<(), kvgrpc::Error> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:8998".to_owned());
    let options = Options { secret: arguments.next(), ..Options::default() };
    let mut registry = RegistryServiceClient::new(connect(&address, options).await?);
    let listed = registry.list_engines(pb::ListEnginesRequest::default()).await.map_err(Refusal::from)?;
    for engine in listed.into_inner().engines {
        println!("{} {} ready={}", engine.name, engine.role().as_str_name(), engine.ready);
    }
    let missing = pb::GetEngineRequest { engine: "nobody".to_owned(), ..Default::default() };
    if let Err(status) = registry.get_engine(missing).await {
        let refusal = Refusal::from(status);
        println!("{:?} engine={}", refusal.reason, refusal.metadata["engine"]);
    }
    Ok(())
}
