//! Dynamo's own reader of KV events: a payload in hexadecimal on each line of its input, what it makes of it on a line each.

use std::io::{BufRead, Write};

use dynamo_kv_router::zmq_wire::{decode_event_batch, BlockHashValue, RawKvEvent};

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout();
    for line in std::io::stdin().lock().lines() {
        let told = match decode_event_batch(&bytes(line?.trim())) {
            Ok(batch) => batch.events.iter().map(spelled).collect::<Vec<_>>().join(" "),
            Err(error) => format!("refused: {error}"),
        };
        writeln!(out, "{told}")?;
    }
    Ok(())
}

fn spelled(event: &RawKvEvent) -> String {
    let place = event.medium().unwrap_or("-");
    match event {
        RawKvEvent::BlockStored { block_hashes, .. } => format!("stored:{}:{place}", joined(block_hashes)),
        RawKvEvent::BlockRemoved { block_hashes, .. } => format!("removed:{}:{place}", joined(block_hashes)),
        other => other.event_type_label().to_owned(),
    }
}

fn joined(hashes: &[BlockHashValue]) -> String {
    hashes.iter().map(|hash| hash.into_u64().to_string()).collect::<Vec<_>>().join(",")
}

fn bytes(hexadecimal: &str) -> Vec<u8> {
    let digits = hexadecimal.as_bytes();
    let pairs = digits.chunks(2).map(|pair| std::str::from_utf8(pair).expect("hexadecimal"));
    pairs.map(|pair| u8::from_str_radix(pair, 16).expect("hexadecimal")).collect()
}
