//! A reader of msgpack that takes exactly what publishers take: `docs/events.md` says what an event may hold.

use std::collections::BTreeMap;

/// Batches are four deep; what nests deeper is hostile. No less than publishers read.
const DEEPEST: usize = 500;
/// What is allocated on the word of a header alone.
const MOST: u64 = 256;
/// The extension of that number is a time, of the years 1 to 9999.
const TIMESTAMP: u8 = 0xff;
const EARLIEST: i64 = -62_135_596_800;
const LATEST: i64 = 253_402_300_799;

/// A value of a field that an event has.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// nil
    Nil,
    /// A truth value.
    Bool(bool),
    /// An integer of at most 2^63 - 1.
    Int(i64),
    /// A larger one.
    Uint(u64),
    /// A number with a fraction.
    Float(f64),
    /// Text.
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// A list.
    List(Vec<Value>),
    /// What has names.
    Map(BTreeMap<String, Value>),
    /// What is passed over: an extension, or a map with keys that are no text.
    Strange,
}

/// The bytes are no msgpack, or hold what publishers refuse.
#[derive(Debug)]
pub(crate) struct Malformed;

type Read<T> = Result<T, Malformed>;

pub(crate) struct Reader<'a> {
    pub(crate) rest: &'a [u8],
    /// How many keys of maps, one within the other, this is in.
    keys: usize,
}

/// Reads exactly one value.
pub(crate) fn decode(payload: &[u8]) -> Read<Value> {
    let mut reader = Reader::new(payload);
    let value = reader.value(0)?;
    if reader.rest.is_empty() {
        Ok(value)
    } else {
        Err(Malformed)
    }
}

impl<'a> Reader<'a> {
    pub(crate) fn new(rest: &'a [u8]) -> Self {
        Self { rest, keys: 0 }
    }

    pub(crate) fn value(&mut self, depth: usize) -> Read<Value> {
        let code = self.take(1)?[0];
        if depth > DEEPEST {
            return Err(Malformed);
        }
        Ok(match code {
            0x00..=0x7f | 0xe0..=0xff => Value::Int(i64::from(code as i8)),
            0x80..=0x8f => self.fields(u64::from(code & 0x0f), depth)?,
            0x90..=0x9f => self.list(u64::from(code & 0x0f), depth)?,
            0xa0..=0xbf => self.text(u64::from(code & 0x1f))?,
            0xc0 => Value::Nil,
            0xc1 => return Err(Malformed),
            0xc2 | 0xc3 => Value::Bool(code == 0xc3),
            0xc4..=0xc6 => {
                let size = self.number(1 << (code - 0xc4))?;
                Value::Bytes(self.take(size)?.to_vec())
            }
            0xc7..=0xc9 => {
                let size = self.number(1 << (code - 0xc7))?;
                self.extension(size)?
            }
            0xca => Value::Float(f64::from(f32::from_bits(self.number(4)? as u32))),
            0xcb => Value::Float(f64::from_bits(self.number(8)?)),
            0xcc..=0xcf => {
                let number = self.number(1 << (code - 0xcc))?;
                i64::try_from(number).map_or(Value::Uint(number), Value::Int)
            }
            0xd0..=0xd3 => {
                let width = 1 << (code - 0xd0);
                let unused = 64 - 8 * width;
                Value::Int(((self.number(width)? << unused) as i64) >> unused)
            }
            0xd4..=0xd8 => self.extension(1 << (code - 0xd4))?,
            0xd9..=0xdb => {
                let size = self.number(1 << (code - 0xd9))?;
                self.text(size)?
            }
            0xdc | 0xdd => {
                let count = self.number(2 << (code - 0xdc))?;
                self.list(count, depth)?
            }
            0xde | 0xdf => {
                let count = self.number(2 << (code - 0xde))?;
                self.fields(count, depth)?
            }
        })
    }

    /// How many values a list has.
    pub(crate) fn list_header(&mut self) -> Read<u64> {
        match self.take(1)?[0] {
            code @ 0x90..=0x9f => Ok(u64::from(code & 0x0f)),
            0xdc => self.number(2),
            0xdd => self.number(4),
            _ => Err(Malformed),
        }
    }

    /// Passes over one value, however deep, and returns its bytes. What it holds need not make sense.
    pub(crate) fn skip(&mut self) -> Read<&'a [u8]> {
        let begin = self.rest;
        let mut left = 1_u64;
        while left > 0 {
            let code = self.take(1)?[0];
            let (size, values) = self.extent(code)?;
            self.take(size)?;
            left = left - 1 + values;
            // Each value has at least one byte.
            if left > self.rest.len() as u64 {
                return Err(Malformed);
            }
        }
        Ok(&begin[..begin.len() - self.rest.len()])
    }

    /// How many bytes and values follow the header of a value.
    fn extent(&mut self, code: u8) -> Read<(u64, u64)> {
        Ok(match code {
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => (0, 0),
            0x80..=0x8f => (0, 2 * u64::from(code & 0x0f)),
            0x90..=0x9f => (0, u64::from(code & 0x0f)),
            0xa0..=0xbf => (u64::from(code & 0x1f), 0),
            0xc1 => return Err(Malformed),
            0xca | 0xcb => (4 << (code - 0xca), 0),
            0xcc..=0xcf => (1 << (code - 0xcc), 0),
            0xd0..=0xd3 => (1 << (code - 0xd0), 0),
            0xd4..=0xd8 => (1 + (1 << (code - 0xd4)), 0),
            0xc4..=0xc6 => (self.number(1 << (code - 0xc4))?, 0),
            0xc7..=0xc9 => (self.number(1 << (code - 0xc7))? + 1, 0),
            0xd9..=0xdb => (self.number(1 << (code - 0xd9))?, 0),
            0xdc | 0xdd => (0, self.number(2 << (code - 0xdc))?),
            0xde | 0xdf => (0, 2 * self.number(2 << (code - 0xde))?),
        })
    }

    fn take(&mut self, count: u64) -> Read<&'a [u8]> {
        if count > self.rest.len() as u64 {
            return Err(Malformed);
        }
        let (taken, rest) = self.rest.split_at(count as usize);
        self.rest = rest;
        Ok(taken)
    }

    fn number(&mut self, width: u64) -> Read<u64> {
        Ok(big_endian(self.take(width)?))
    }

    fn text(&mut self, size: u64) -> Read<Value> {
        let text = std::str::from_utf8(self.take(size)?).map_err(|_| Malformed)?;
        Ok(Value::Text(text.to_owned()))
    }

    fn extension(&mut self, size: u64) -> Read<Value> {
        let taken = self.take(size + 1)?;
        if taken[0] == TIMESTAMP {
            check_time(&taken[1..])?;
        } else if self.keys > 0 {
            return Err(Malformed);
        }
        Ok(Value::Strange)
    }

    fn list(&mut self, count: u64, depth: usize) -> Read<Value> {
        // Each value has at least one byte.
        if count > self.rest.len() as u64 {
            return Err(Malformed);
        }
        let mut values = Vec::with_capacity(count.min(MOST) as usize);
        for _ in 0..count {
            values.push(self.value(depth + 1)?);
        }
        Ok(Value::List(values))
    }

    fn fields(&mut self, count: u64, depth: usize) -> Read<Value> {
        // A map is no key, nor in one: publishers cannot read it.
        if count > self.rest.len() as u64 || self.keys > 0 {
            return Err(Malformed);
        }
        let (mut fields, mut is_strange) = (BTreeMap::new(), false);
        for _ in 0..count {
            self.keys += 1;
            let key = self.value(depth + 1)?;
            self.keys -= 1;
            let value = self.value(depth + 1)?;
            match key {
                Value::Text(name) => drop(fields.insert(name, value)),
                _ => is_strange = true,
            }
        }
        Ok(if is_strange { Value::Strange } else { Value::Map(fields) })
    }
}

pub(crate) fn big_endian(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Refuses what publishers do, whose library makes a date of it.
fn check_time(written: &[u8]) -> Read<()> {
    let (nanoseconds, seconds) = match written.len() {
        4 => (0, 0),
        8 => (big_endian(written) >> 34, 0),
        12 => (big_endian(&written[..4]), big_endian(&written[4..]) as i64),
        _ => return Err(Malformed),
    };
    if nanoseconds > 999_999_999 || !(EARLIEST..=LATEST).contains(&seconds) {
        return Err(Malformed);
    }
    Ok(())
}
