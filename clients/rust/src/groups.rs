//! What the cache groups of a model need, so that a prefix counts: windows, states, other full attention.

use crate::batch::BlockStored;
use crate::msgpack::Value;

/// Prefixes are matched in the group of full attention, which engines number first; the others hold parts of a sequence.
pub(crate) const PREFIX_GROUP: u32 = 0;
pub(crate) const MOST_GROUPS: usize = 64;

/// How far one has to reach for a block, the fastest first: device, host, disk, store.
pub(crate) const REACHES: usize = 4;
pub(crate) const HOST: usize = 1;
/// Further than anything.
pub(crate) const NOWHERE: usize = REACHES;

pub(crate) fn reach_of(medium: &str) -> usize {
    match medium {
        "GPU" => 0,
        "CPU" | "CPU_PINNED" => HOST,
        "DISK" => 2,
        _ => 3,
    }
}

/// One group of a cache as its events last told; sizes in tokens, 0: not told.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct CacheGroup {
    pub(crate) kind: String,
    pub(crate) window: i64,
    pub(crate) page_tokens: u32,
}

impl CacheGroup {
    pub(crate) fn learn(&mut self, event: &BlockStored) {
        if let Some(Value::Text(kind)) =
            event.more.get("kv_cache_spec_kind").filter(|kind| **kind != Value::Text(String::new()))
        {
            self.kind.clone_from(kind);
        }
        match event.more.get("kv_cache_spec_sliding_window") {
            Some(Value::Int(tokens)) if *tokens != 0 => self.window = *tokens,
            Some(Value::Uint(_)) => self.window = i64::MAX,
            _ => {}
        }
        if let Some(size) = size_of(event) {
            self.page_tokens = size;
        }
    }

    /// The longest prefix up to `position`, in steps, that may be of use to the group, whose blocks have `size` steps of `step`
    /// tokens. `holds` says whether the block that ends at a step is here.
    fn usable(&self, position: usize, size: usize, step: usize, holds: impl Fn(usize) -> bool) -> usize {
        if matches!(self.kind.as_str(), "encoder_only_attention" | "cross_attention") {
            // What belongs to another sequence than the prompt's.
            return position;
        }
        let position = position - position % size;
        let missing_from = |first: usize| {
            let mut end = position;
            while end > first {
                if !holds(end) {
                    return end - size;
                }
                end -= size;
            }
            position
        };
        match self.kind.as_str() {
            "mamba" if position == 0 || holds(position) => position,
            "mamba" => position - size,
            "sliding_window" | "sliding_window_mla" | "chunked_local_attention" if self.window != 0 => {
                let blocks = (self.window.max(1) as u64 - 1).div_ceil((size * step) as u64);
                let needed = usize::try_from(blocks).unwrap_or(usize::MAX);
                missing_from(position.saturating_sub(needed.saturating_mul(size)))
            }
            _ => (1..=position / size)
                .map(|block| block * size)
                .find(|end| !holds(*end))
                .map_or(position, |end| end - size),
        }
    }
}

/// Tokens of a block; None: not told.
pub(crate) fn size_of(event: &BlockStored) -> Option<u32> {
    u32::try_from(event.block_size).ok().filter(|size| *size > 0)
}

/// How many of the first `prefix` blocks are of use where these groups hold blocks: the longest prefix that all can use.
///
/// Positions count the prompt's hashes, which are so many tokens apart (`step`; 0: a block). `holds` says whether a group holds
/// the block that ends at one.
pub(crate) fn usable<'a>(
    prefix: usize,
    page_tokens: u32,
    step: u32,
    groups: impl Iterator<Item = (u32, &'a CacheGroup)> + Clone,
    holds: impl Fn(u32, usize) -> bool,
) -> usize {
    let step = [step, page_tokens, 1].into_iter().find(|tokens| *tokens > 0).unwrap_or(1);
    let steps_of = |tokens: u32| (tokens / step).max(1) as usize;
    let unit = steps_of(page_tokens);
    let mut position = prefix * unit;
    while position > 0 {
        let mut least = position;
        for (number, group) in groups.clone() {
            let size = steps_of(if group.page_tokens > 0 { group.page_tokens } else { page_tokens });
            least = least.min(group.usable(position, size, step as usize, |end| holds(number, end)));
        }
        least -= least % unit;
        if least == position {
            return position / unit;
        }
        position = least;
    }
    0
}
