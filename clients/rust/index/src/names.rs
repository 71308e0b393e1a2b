//! The names in a certificate, in its own order: webpki gives its DNS names and its URIs each apart, and no emails.

const OCTETS: u8 = 0x04;
const OBJECT: u8 = 0x06;
const SEQUENCE: u8 = 0x30;
const EXTENSIONS: u8 = 0xa3;
const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 0x11];

/// The emails, DNS names and URIs that it is for; no other kind of name ends in a role. None: it cannot be read.
pub fn names_in(certificate: &[u8]) -> Option<Vec<String>> {
    let Some(&(SEQUENCE, fields)) = elements(only_sequence(certificate)?)?.first() else { return None };
    let (mut names, mut is_found) = (Vec::new(), false);
    for (_, field) in elements(fields)?.into_iter().filter(|(tag, _)| *tag == EXTENSIONS) {
        for (_, extension) in elements(only_sequence(field)?)? {
            let extension = elements(extension)?;
            let [(OBJECT, SUBJECT_ALT_NAME), .., last] = extension[..] else { continue };
            let (OCTETS, list, false) = (last.0, last.1, is_found) else { return None };
            is_found = true;
            for (tag, name) in elements(only_sequence(list)?)? {
                match tag {
                    // As gRPC gives them to Python: each byte is a character.
                    0x81 | 0x82 | 0x86 => names.push(name.iter().copied().map(char::from).collect()),
                    0xa0 | 0xa3..=0xa5 | 0x87 | 0x88 => {}
                    _ => return None,
                }
            }
        }
    }
    Some(names)
}

fn only_sequence(bytes: &[u8]) -> Option<&[u8]> {
    elements(bytes).and_then(|found| if let [(SEQUENCE, value)] = found[..] { Some(value) } else { None })
}

/// Tags and values of what stands in `rest`, in DER: a length takes as few bytes as it can, and here two at most.
fn elements(mut rest: &[u8]) -> Option<Vec<(u8, &[u8])>> {
    let mut found = Vec::new();
    while let [tag, first, after @ ..] = rest {
        let (length, after) = match (first, after) {
            (..=0x7f, _) => (usize::from(*first), after),
            (0x81, [low @ 0x80..=0xff, after @ ..]) => (usize::from(*low), after),
            (0x82, [high @ 1..=0xff, low, after @ ..]) => (usize::from(u16::from_be_bytes([*high, *low])), after),
            _ => return None,
        };
        let (value, after) = after.split_at_checked(length)?;
        found.push((*tag, value));
        rest = after;
    }
    rest.is_empty().then_some(found)
}
