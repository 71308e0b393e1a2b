//! Golden messages as bytes: nothing of them is lost (tests/conformance/messages).

use std::path::Path;

use prost::Message;

use crate::pb;

#[test]
fn every_field_of_a_message_is_read_and_written_again() {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/conformance/messages"));
    let mut read = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "binpb") {
            let bytes = std::fs::read(&path).unwrap();
            let name = path.file_stem().unwrap().to_str().unwrap();
            match name.split('.').next().unwrap() {
                "CacheOperation" => keeps::<pb::CacheOperation>(name, &bytes),
                "KeepAliveRequest" => keeps::<pb::KeepAliveRequest>(name, &bytes),
                "PlanResponse" => keeps::<pb::PlanResponse>(name, &bytes),
                "PromptPages" => keeps::<pb::PromptPages>(name, &bytes),
                "PurgePagesResponse" => keeps::<pb::PurgePagesResponse>(name, &bytes),
                "RankSelector" => keeps::<pb::RankSelector>(name, &bytes),
                "RegisterRequest" => keeps::<pb::RegisterRequest>(name, &bytes),
                "RegisterResponse" => keeps::<pb::RegisterResponse>(name, &bytes),
                "ScoreRequest" => keeps::<pb::ScoreRequest>(name, &bytes),
                "WatchRequest" => keeps::<pb::WatchRequest>(name, &bytes),
                "WatchResponse" => keeps::<pb::WatchResponse>(name, &bytes),
                other => panic!("{other} is not known here"),
            }
            read += 1;
        }
    }
    assert!(read >= 16, "{read}");
}

/// What is not known is left out when it is written again: it would be shorter.
fn keeps<M: Message + Default + std::fmt::Debug>(name: &str, bytes: &[u8]) {
    let message = M::decode(bytes).unwrap();
    assert_eq!(message.encoded_len(), bytes.len(), "{name}");
    let again = M::decode(message.encode_to_vec().as_slice()).unwrap();
    assert_eq!(format!("{again:?}"), format!("{message:?}"), "{name}");
}
