//! Tokens are those of the other languages: tests/conformance/tokens/vectors.json.

use serde::Deserialize;

#[derive(Deserialize)]
struct Vector {
    secret: String,
    address: String,
    time: u64,
    target: String,
    authorization: String,
}

#[test]
fn tokens_are_those_of_every_language() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/conformance/tokens/vectors.json");
    let vectors: Vec<Vector> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(vectors.len() >= 10);
    for vector in vectors {
        let target = kvgrpc::target_of(&vector.address).unwrap();
        assert_eq!(target, vector.target, "{}", vector.address);
        assert_eq!(kvgrpc::authorization(&vector.secret, &target, vector.time), vector.authorization);
    }
}

#[test]
fn what_is_no_address_has_no_target() {
    for address in ["", "host", ":1", "host:", "host:70000", "host:port"] {
        assert_eq!(kvgrpc::target_of(address), None, "{address}");
    }
}
