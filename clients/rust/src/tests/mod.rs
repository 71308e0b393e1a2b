//! What every implementation must read and do alike: the golden files of tests/conformance/events, and the rules.

mod contents;
mod failures;
mod messages;
mod payloads;
mod rules;
mod script;
mod world;

use serde_json::Value as Json;

fn golden(name: &str) -> Json {
    serde_json::from_slice(&golden_bytes(name)).unwrap()
}

fn golden_bytes(name: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/conformance/events");
    std::fs::read(format!("{folder}/{name}")).unwrap()
}

fn unhex(digits: &str) -> Vec<u8> {
    (0..digits.len() / 2).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn number(text: &Json) -> u64 {
    text.as_str().map_or_else(|| text.as_u64().unwrap(), |text| text.parse().unwrap())
}
