//! What a cache holds, and whether that is what its publisher says.

use std::collections::BTreeMap;

use super::{golden, number, unhex};
use crate::blocks::Blocks;
use crate::contents::mix;
use crate::{decode_batch, pb, BlockHash, BlockRemoved, BlockStored, Cache, Event, Item, Place, Verdict};

fn stored(medium: &str, hashes: &[u64]) -> Event {
    let hashes = hashes.iter().copied().map(BlockHash::Value).collect();
    Event::BlockStored(BlockStored { hashes, medium: medium.into(), ..Default::default() })
}

fn removed(medium: &str, hashes: &[u64]) -> Event {
    let hashes = hashes.iter().copied().map(BlockHash::Value).collect();
    Event::BlockRemoved(BlockRemoved { hashes, medium: medium.into(), ..Default::default() })
}

fn reset(log: &str, whole: bool) -> Item {
    Item::Reset { log_id: log.into(), whole }
}

fn events(next_sequence: u64, events: Vec<Event>) -> Item {
    Item::Events { log_id: "a".into(), next_sequence, events, complete: true, state: None }
}

fn digest_at(next_sequence: u64, tiers: Vec<pb::TierDigest>) -> pb::StateDigest {
    pb::StateDigest { next_sequence, tiers, ..Default::default() }
}

fn payload_of(digits: &serde_json::Value) -> Vec<Event> {
    decode_batch(&unhex(digits.as_str().unwrap())).unwrap().events
}

#[test]
fn a_block_is_there_until_its_last_copy_goes() {
    let (mut cache, device) = (Cache::new(), Place::new("", 0));
    cache.apply(&[stored("", &[1, 1, 2]), removed("gpu", &[1, 3])]);
    assert!(cache.holds(&device, &BlockHash::Value(1)));
    assert_eq!(cache.blocks(), BTreeMap::from([(device.clone(), 2)]));
    cache.apply(&[removed("", &[1])]);
    assert!(!cache.holds(&device, &BlockHash::Value(1)));
    cache.apply(&[Event::AllBlocksCleared]);
    assert!(cache.blocks().is_empty());
}

#[test]
fn digests_are_those_of_the_vectors() {
    for hash in golden("digests.json")["hashes"].as_array().unwrap() {
        assert_eq!(mix(number(&hash["key"])), number(&hash["mix"]), "{hash}");
    }
    let mut cache = Cache::new();
    let digest = BlockHash::Digest((0..32).collect());
    let in_group = BlockStored { hashes: vec![digest], medium: "cpu".into(), group: 1, ..Default::default() };
    cache.apply(&[stored("", &[1, u64::MAX - 1, 5]), Event::BlockStored(in_group), removed("", &[5])]);
    let tier = |medium: &str, group, blocks, mixed_hashes| pb::TierDigest {
        medium: medium.into(),
        group,
        blocks,
        mixed_hashes,
        ..Default::default()
    };
    let state = digest_at(0, vec![tier("CPU", 1, 1, 0xc195_0c7b_ba2b_5c3b), tier("GPU", 0, 2, 0x842a_6c7c_c2f7_04e2)]);
    assert!(cache.is(&state), "{:?}", cache.digest());
    cache.apply(&[stored("", &[6])]);
    assert!(!cache.is(&state));
}

#[test]
fn tiers_and_groups_beyond_the_bound_are_passed_over_as_by_the_publisher() {
    let (log, mut cache) = (golden("places.json"), Cache::new());
    let states = log["states"].as_array().unwrap();
    assert!(states.len() >= 9);
    for (payload, state) in log["payloads"].as_array().unwrap().iter().zip(states) {
        cache.apply(&payload_of(payload));
        let tiers = cache.digest();
        let (blocks, mixed) = tiers.iter().fold((0_u64, 0_u64), |(blocks, mixed), tier| {
            (blocks + tier.blocks, mixed.wrapping_add(tier.mixed_hashes))
        });
        let expected = (number(&state["places"]), number(&state["blocks"]), number(&state["mixed_hashes"]));
        assert_eq!((tiers.len() as u64, blocks, mixed), expected);
    }
}

#[test]
fn a_clear_of_one_tier_and_what_cannot_be_read_leave_what_every_reader_knows() {
    let (steps, mut cache) = (golden("clears.json"), Cache::new());
    cache.hear(&reset("a", true));
    assert!(steps.as_array().unwrap().len() >= 10);
    for (at, step) in steps.as_array().unwrap().iter().enumerate() {
        cache.hear(&events(at as u64 + 1, payload_of(&step["payload"])));
        let mut held = BTreeMap::new();
        for told in step["held"].as_array().unwrap() {
            let place = Place::new(told["medium"].as_str().unwrap(), told["group"].as_u64().unwrap() as u32);
            let blocks = told["blocks"].as_array().unwrap();
            assert!(
                blocks.iter().all(|block| cache.holds(&place, &BlockHash::Value(block.as_u64().unwrap()))),
                "{step}"
            );
            held.insert(place, blocks.len() as u64);
        }
        assert_eq!((cache.blocks(), cache.doubtful()), (held, step["doubtful"].as_bool().unwrap()), "{step}");
    }
}

#[test]
fn a_digest_of_a_publisher_that_can_read_it_ends_a_doubt() {
    let mut cache = Cache::new();
    cache.hear(&reset("a", true));
    cache.hear(&events(1, Vec::new()));
    cache.hear(&events(2, vec![Event::Unknown { name: "BlockMoved".into(), raw: Vec::new() }]));
    let doubtful_at_2 = pb::StateDigest { doubtful: true, ..digest_at(2, Vec::new()) };
    let steps = [
        (doubtful_at_2.clone(), Verdict::Equal, true),
        (pb::StateDigest { kind: 99, ..digest_at(2, Vec::new()) }, Verdict::Unknown, true),
        (digest_at(0, Vec::new()), Verdict::Unknown, true),
        (pb::StateDigest { kind: 1, ..digest_at(2, Vec::new()) }, Verdict::Equal, false),
    ];
    for (state, verdict, doubtful) in steps {
        assert_eq!((cache.compare(Some(&state)), cache.doubtful()), (verdict, doubtful), "{state:?}");
    }
    // What its publisher could not read was read here.
    let tier = pb::TierDigest { medium: "GPU".into(), blocks: 1, ..Default::default() };
    assert_eq!(cache.compare(Some(&pb::StateDigest { tiers: vec![tier], ..doubtful_at_2 })), Verdict::Unknown);
    // A snapshot of a publisher that cannot read it either is as doubtful as that.
    let state = Some(pb::StateDigest { doubtful: true, ..digest_at(3, Vec::new()) });
    cache.hear(&reset("a", true));
    cache.hear(&Item::Events { log_id: "a".into(), next_sequence: 3, events: Vec::new(), complete: true, state });
    assert!(cache.doubtful());
}

#[test]
fn a_digest_of_the_past_is_compared_with_its_checkpoint() {
    let (log, mut cache) = (golden("checkpoints.json"), Cache::new());
    cache.hear(&reset("a", true));
    for (at, payload) in log["payloads"].as_array().unwrap().iter().enumerate() {
        cache.hear(&events(at as u64 + 1, payload_of(payload)));
    }
    let digests = log["digests"].as_object().unwrap();
    assert!(digests.len() >= 4);
    for (next, tiers) in digests {
        let tiers = tiers.as_array().unwrap().iter().map(|tier| pb::TierDigest {
            medium: tier["medium"].as_str().unwrap().into(),
            group: tier["group"].as_u64().unwrap() as u32,
            blocks: tier["blocks"].as_u64().unwrap(),
            mixed_hashes: number(&tier["mixed_hashes"]),
            ..Default::default()
        });
        let mut digest = digest_at(next.parse().unwrap(), tiers.collect());
        assert_eq!(cache.compare(Some(&digest)), Verdict::Equal, "{next}");
        digest.tiers.clear();
        assert_eq!(cache.compare(Some(&digest)), Verdict::Different, "{next}");
    }
    for next in [0, 63, 65, 199, 256] {
        assert_eq!(cache.compare(Some(&digest_at(next, Vec::new()))), Verdict::Unknown, "{next}");
    }
}

#[test]
fn only_the_last_checkpoints_are_kept_and_none_of_another_log() {
    let mut cache = Cache::new();
    cache.hear(&reset("a", true));
    for next in 1..=100 * 64 {
        cache.hear(&events(next, Vec::new()));
    }
    assert_eq!(cache.compare(Some(&digest_at(37 * 64, Vec::new()))), Verdict::Equal);
    assert_eq!(cache.compare(Some(&digest_at(36 * 64, Vec::new()))), Verdict::Unknown);
    cache.hear(&reset("b", true));
    assert_eq!(cache.compare(Some(&digest_at(64 * 64, Vec::new()))), Verdict::Unknown);
}

#[test]
fn what_was_not_seen_from_its_beginning_is_compared_once_it_was_cleared() {
    let mut cache = Cache::new();
    cache.hear(&reset("a", false));
    cache.hear(&events(9, Vec::new()));
    assert_eq!(cache.compare(Some(&digest_at(9, Vec::new()))), Verdict::Unknown);
    cache.hear(&events(10, vec![Event::AllBlocksCleared]));
    assert_eq!(cache.compare(Some(&digest_at(10, Vec::new()))), Verdict::Equal);
}

/// Many slots of one table at once, which come, go and are retired, against plain maps.
#[test]
fn a_table_of_many_slots_says_what_plain_maps_say() {
    let mut random = fastrand::Rng::with_seed(7);
    let mut blocks = Blocks::new(3);
    let owner = blocks.new_owner();
    let mut model: Vec<(u32, BTreeMap<u64, u32>)> =
        (0..70).map(|_| (blocks.new_slot(owner, 0, 0), BTreeMap::new())).collect();
    for round in 0..3000 {
        let (slot, held) = &mut model[random.usize(..70)];
        let from = random.u64(..500);
        let keys: Vec<u64> = (0..random.u64(1..200)).map(|at| from + at % 150).collect();
        match random.u32(..8) {
            0 => {
                blocks.retire(*slot, held.len() as u64);
                *slot = blocks.new_slot(owner, 0, 0);
                held.clear();
            }
            1..=4 => {
                let before = held.len();
                keys.iter().for_each(|key| *held.entry(*key).or_insert(0) += 1);
                assert_eq!(blocks.store(*slot, keys.into_iter()) as usize, held.len() - before);
            }
            _ => {
                let (before, mut gone, mut told) = (held.len(), Vec::new(), Vec::new());
                for key in &keys {
                    if let Some(copies) = held.get_mut(key) {
                        gone.push(*key);
                        *copies -= 1;
                        if *copies == 0 {
                            held.remove(key);
                        }
                    }
                }
                let vanished = blocks.remove(*slot, keys.into_iter(), |key| told.push(key));
                assert_eq!((vanished as usize, told), (before - held.len(), gone));
            }
        }
        if round % 50 == 0 {
            for key in 0..700 {
                let set = blocks.set_of(key);
                for (slot, held) in &model {
                    assert_eq!(blocks.holders().has(set, *slot), held.contains_key(&key), "round {round}, {key}");
                }
            }
        }
    }
    for (slot, held) in &model {
        blocks.remove(*slot, held.iter().flat_map(|(key, copies)| vec![*key; *copies as usize]), |_| {});
    }
    assert!(blocks.slots_ever() < 1000, "slots are used again: {}", blocks.slots_ever());
    assert!(blocks.holders().sets_ever() < 70_000);
}
