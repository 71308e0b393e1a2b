//! Keeps a row of an engine registered, and says what becomes of it: `register ENGINE EPOCH ADDRESS[,ADDRESS...]`. It ends with
//! its input.

use kvgrpc::pb::{Endpoints, Layout, RankId, RankRef, RankRow, Role};
use kvgrpc::{Dialer, Options, RegistrationState, Registry};
use tokio::io::AsyncReadExt;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [engine, epoch, addresses] = arguments.as_slice() else { return Err("ENGINE EPOCH ADDRESS".into()) };
    let dial = |address: &str| Dialer::new(address, Options::default());
    let mut dialers = addresses.split(',').map(dial).collect::<Result<Vec<_>, _>>()?;
    let replicas = dialers.split_off(1);
    let registry = Registry::new(dialers.remove(0), replicas);
    let rank = RankRef { rank: Some(RankId { engine: engine.clone(), ..Default::default() }), epoch: epoch.parse()? };
    let row = RankRow {
        rank: Some(rank),
        role: Role::Prefill.into(),
        endpoints: Some(Endpoints { grpc: "10.0.0.1:50051".to_owned(), ..Default::default() }),
        layout: Some(Layout { dp: 1, pp: 1, cp: 1, tp: 1 }),
        data_plane: "shm".to_owned(),
        ..Default::default()
    };
    let mut registration = registry.register(vec![row]).await?;
    println!("registered");
    let ended = tokio::spawn(async { tokio::io::stdin().read_to_end(&mut Vec::new()).await });
    tokio::pin!(ended);
    loop {
        tokio::select! {
            _ = &mut ended => break,
            () = registration.changed() => {}
        }
        match registration.state() {
            RegistrationState::Registered => println!("registered"),
            RegistrationState::Retrying(why) => println!("retrying: {why}"),
            RegistrationState::Superseded => {
                println!("superseded by epoch {}", registration.superseded()[0].epoch);
                break;
            }
        }
    }
    registration.close().await?;
    println!("closed");
    Ok(())
}
