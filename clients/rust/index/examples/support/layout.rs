//! Which blocks the engines of a made-up fleet hold.

/// Blocks of a conversation.
pub const CHAIN: u64 = 512;
/// How many batches `made` makes, and what each stores.
pub const MADE: u64 = 256;
pub const BLOCKS_OF_A_BATCH: u64 = 8;
/// Of a conversation the first engines hold all, some half, and all of them the prompt that all share.
const HELD: [(u64, u64); 3] = [(4, CHAIN), (16, 256), (u64::MAX, 64)];

pub struct Layout {
    pub engines: u64,
    /// Of each engine.
    pub blocks: u64,
    /// Each block lies at half of the engines, in place of conversations.
    pub halves: bool,
}

impl Layout {
    /// So many conversations.
    pub fn chains(&self) -> u64 {
        let (mut held, mut from) = (0, 0);
        for (below, blocks) in HELD {
            let to = below.min(self.engines);
            held += (to - from) * blocks;
            from = to;
        }
        (self.blocks * self.engines / held).max(1)
    }

    /// How many blocks of a conversation an engine has.
    pub fn held(&self, engine: u64, chain: u64) -> u64 {
        let place = (engine + 7 * chain) % self.engines;
        HELD.iter().find(|(below, _)| place < *below).map_or(0, |(_, held)| *held)
    }

    #[allow(dead_code)]
    pub fn blocks_of(&self, engine: u64) -> Vec<u64> {
        if self.halves {
            return (0..2 * self.blocks).filter(|block| (block / 64 + engine).is_multiple_of(2)).map(mix).collect();
        }
        (0..self.chains()).flat_map(|chain| (0..self.held(engine, chain)).map(move |at| key(chain, at))).collect()
    }
}

/// Batches of one engine, told again and again: the blocks that go, and those that come. Each stores 8 blocks, and removes those
/// that the one before it stored.
#[allow(dead_code)]
pub fn made(engine: u64) -> Vec<(Vec<u64>, Vec<u64>)> {
    let key = |at: u64, block: u64| mix((1 << 62) | (engine << 40) | ((at % MADE) * BLOCKS_OF_A_BATCH + block));
    let of = |at: u64| (0..BLOCKS_OF_A_BATCH).map(|block| key(at, block)).collect();
    (0..MADE).map(|at| (of(at + MADE - 1), of(at))).collect()
}

pub fn key(chain: u64, at: u64) -> u64 {
    mix(chain * CHAIN + at)
}

#[allow(dead_code)]
pub fn engine_name(engine: u64) -> String {
    format!("engine{engine}")
}

/// splitmix64
pub fn mix(key: u64) -> u64 {
    let mut z = key.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
