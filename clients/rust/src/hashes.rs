//! The hashes of a question: most of what a router and an index say to each other, so they are copied, not gone through.

use prost::bytes::{Buf, BufMut};
use prost::encoding::{decode_varint, encode_key, encode_varint, fixed64, skip_field, DecodeContext, WireType};
use prost::{DecodeError, Message};

const VALUES: u32 = 1;
const WIDTH: usize = size_of::<u64>();
/// So many are written at a time.
const AT_A_TIME: usize = 64;

/// Hashes of blocks as events carry them, in the order of the request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockHashes {
    /// 64 bits in two's complement: -2 and 2^64 - 2 are one block; of a longer digest the last 8 bytes, big-endian.
    pub values: Vec<u64>,
}

impl Message for BlockHashes {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        if self.values.is_empty() {
            return;
        }
        encode_key(VALUES, WireType::LengthDelimited, buf);
        encode_varint((WIDTH * self.values.len()) as u64, buf);
        for values in self.values.chunks(AT_A_TIME) {
            let mut written = [0; WIDTH * AT_A_TIME];
            for (to, value) in written.as_chunks_mut().0.iter_mut().zip(values) {
                *to = value.to_le_bytes();
            }
            buf.put_slice(&written[..WIDTH * values.len()]);
        }
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        match tag {
            VALUES => match packed(wire_type, buf.chunk()) {
                Some((read, values)) => {
                    self.values.extend(values.as_chunks().0.iter().map(|value| u64::from_le_bytes(*value)));
                    buf.advance(read);
                    Ok(())
                }
                None => fixed64::merge_repeated(wire_type, &mut self.values, buf, context).map_err(|mut error| {
                    error.push("BlockHashes", "values");
                    error
                }),
            },
            _ => skip_field(wire_type, tag, buf, context),
        }
    }

    fn encoded_len(&self) -> usize {
        fixed64::encoded_len_packed(VALUES, &self.values)
    }

    fn clear(&mut self) {
        self.values.clear();
    }
}

/// The bytes of values that lie behind each other, and how many with their length before them. None: they are told in another
/// way, lie in several parts of a buffer, or are none; others find out.
fn packed(wire_type: WireType, chunk: &[u8]) -> Option<(usize, &[u8])> {
    if wire_type != WireType::LengthDelimited {
        return None;
    }
    let mut rest = chunk;
    let length = usize::try_from(decode_varint(&mut rest).ok()?).ok()?;
    let values = rest.get(..length).filter(|values| values.len().is_multiple_of(WIDTH))?;
    Some((chunk.len() - rest.len() + length, values))
}

#[cfg(test)]
mod tests {
    use prost::bytes::Bytes;

    use super::*;

    /// The message as prost derives it.
    #[derive(Clone, PartialEq, Message)]
    struct Derived {
        #[prost(fixed64, repeated, tag = "1")]
        values: Vec<u64>,
    }

    fn both(bytes: &[u8]) -> [Option<Vec<u64>>; 2] {
        let read = |decoded: Result<BlockHashes, DecodeError>| decoded.ok().map(|hashes| hashes.values);
        let whole = read(BlockHashes::decode(bytes));
        // In parts too, as a buffer may be.
        for at in 0..=bytes.len().min(24) {
            assert_eq!(read(BlockHashes::decode(Bytes::copy_from_slice(&bytes[..at]).chain(&bytes[at..]))), whole);
        }
        [whole, Derived::decode(bytes).ok().map(|derived| derived.values)]
    }

    #[test]
    fn hashes_are_written_and_read_as_prost_derives_it() {
        let mut random = fastrand::Rng::with_seed(32);
        for count in [0, 1, 2, 15, 16, 17, 63, 64, 65, 512, 1000] {
            let values: Vec<u64> = (0..count).map(|_| random.u64(..)).collect();
            let (ours, derived) = (BlockHashes { values: values.clone() }, Derived { values: values.clone() });
            let bytes = ours.encode_to_vec();
            assert_eq!((bytes.len(), &bytes), (ours.encoded_len(), &derived.encode_to_vec()));
            assert_eq!(both(&bytes), [Some(values.clone()), Some(values)]);
        }
    }

    #[test]
    fn what_is_told_in_another_way_or_wrong_is_read_as_prost_derives_it() {
        let one = 7_u64.to_le_bytes();
        let single = [&[0x09], one.as_slice()].concat();
        let packed = [&[0x0a, 8], one.as_slice()].concat();
        let other = [0x12, 2, 1, 2];
        let several = [single.as_slice(), &packed, &other, &packed, &single].concat();
        assert_eq!(both(&several), [Some(vec![7; 4]), Some(vec![7; 4])]);
        let empty = [0x0a, 0];
        assert_eq!(both(&empty), [Some(Vec::new()), Some(Vec::new())]);
        for wrong in [&packed[..9], &[0x0a, 7, 1, 2, 3, 4, 5, 6, 7], &[0x0a, 9], &[0x08, 1], &[0x0a, 0xff, 0xff]] {
            assert_eq!(both(wrong), [None, None]);
        }
        let mut random = fastrand::Rng::with_seed(33);
        for _ in 0..10_000 {
            let mut bytes = several.clone();
            for _ in 0..random.usize(1..4) {
                let at = random.usize(..bytes.len());
                bytes[at] = random.u8(..);
            }
            let [ours, derived] = both(&bytes);
            assert_eq!(ours, derived, "{bytes:?}");
        }
    }
}
