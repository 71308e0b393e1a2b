//! Prints what a rank publishes, and how its cache stands: `tail ADDRESS [SECRET]`.

use kvgrpc::{Dialer, EventFollower, Item, Options, Stream};

#[tokio::main]
async fn main() -> Result<(), kvgrpc::Error> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:50051".to_owned());
    let options = Options { secret: arguments.next(), ..Options::default() };
    let typed = std::env::var("TYPED").is_ok();
    let mut follower = EventFollower::new(Dialer::new(&address, options)?, Stream { typed, ..Stream::default() });
    loop {
        match follower.next().await {
            Item::Void(cause) => println!("nothing is known: {cause}"),
            Item::Reset { log_id, .. } => println!("log {log_id}: from the beginning"),
            Item::Events { next_sequence, events, .. } => println!("{next_sequence:8}  {} events", events.len()),
            Item::Current { next_sequence, lag, state, .. } => {
                let is_equal = lag == 0 && state.is_some_and(|state| follower.cache().is(&state));
                let blocks: Vec<_> = follower.cache().blocks().into_iter().collect();
                let held: Vec<_> =
                    blocks.iter().map(|(place, count)| format!("{} {}: {count}", place.medium, place.group)).collect();
                println!("current at {next_sequence}: [{}], digest equal: {is_equal}", held.join(", "));
            }
            // A router goes on, and tells a person.
            Item::Failed { cause, lasting: true } => {
                eprintln!("{cause}");
                std::process::exit(1);
            }
            Item::Failed { cause, .. } => eprintln!("{cause}"),
        }
    }
}
