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

#[test]
fn a_server_knows_who_made_a_token_and_for_whom() {
    let (secret, target) = ("9f86d081884c7d659a2feaa0c55ad015", "10.0.0.1:8997");
    let secrets = kvgrpc::Secrets::new([(secret.to_owned(), "consumer".to_owned())].into());
    let header = kvgrpc::authorization(secret, target, 1_700_000_000);
    let proven = secrets.proven(&header).unwrap();
    assert_eq!((&*proven.role, &*proven.target, proven.made_at), ("consumer", target, 1_700_000_000));
    let other = kvgrpc::authorization("another secret of that length", target, 1_700_000_000);
    let later = header.replace("1700000000", "1700000001");
    for header in ["", "Bearer", "Bearer a.b.c.d.e", secret, &other, &later, &header[..header.len() - 2]] {
        assert_eq!(secrets.proven(header), None, "{header}");
    }
}
