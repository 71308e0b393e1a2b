//! Who a certificate is for, by its names in their own order; bytes that are no certificate are for nobody.

use base64::prelude::{Engine as _, BASE64_STANDARD};

use super::{names_in, who_is_named};

// Of openssl req -x509 -newkey ed25519 -nodes -subj /CN=a.operator -days 36500 -outform DER -addext subjectAltName=...
// URI:spiffe://c/kvgrpc/consumer,DNS:ops.operator
const URI_THEN_DNS: &str = "\
    MIIBeDCCASqgAwIBAgIUPXGGtrrYSTWu+dESOEAKcXV4mxQwBQYDK2VwMBUxEzARBgNVBAMMCmEub3BlcmF0b3IwIBcNMjYxMTI2MTQyOTQyWh\
    gPMjEyNjExMDIxNDI5NDJaMBUxEzARBgNVBAMMCmEub3BlcmF0b3IwKjAFBgMrZXADIQBM4Cobjkg73tbVRS3LjSka8XO22Hr7AFm7aMqnvvbX\
    s6OBiTCBhjAdBgNVHQ4EFgQUPfbALkQ7qsOSwPhoXQLOlNLRWvQwHwYDVR0jBBgwFoAUPfbALkQ7qsOSwPhoXQLOlNLRWvQwDwYDVR0TAQH/BA\
    UwAwEB/zAzBgNVHREELDAqhhpzcGlmZmU6Ly9jL2t2Z3JwYy9jb25zdW1lcoIMb3BzLm9wZXJhdG9yMAUGAytlcANBALzWVpw9KkJTY0jPiruX\
    J5S3dGBXXhIJyV2JWHTVm0Lh6s+IRhKmDmU4JBBwf1zCN4V48MBxfeyZF2wnuyp9qQY=";
// DNS:ops.operator,URI:spiffe://c/kvgrpc/consumer
const DNS_THEN_URI: &str = "\
    MIIBeDCCASqgAwIBAgIUZfsORaa36sgWCqzHu49DA+18FZswBQYDK2VwMBUxEzARBgNVBAMMCmEub3BlcmF0b3IwIBcNMjYxMTI2MTQyOTQyWh\
    gPMjEyNjExMDIxNDI5NDJaMBUxEzARBgNVBAMMCmEub3BlcmF0b3IwKjAFBgMrZXADIQD+bgkLC26WBjTtFsYz2+aKwLwHGVEEU+dngvDGpuPW\
    LaOBiTCBhjAdBgNVHQ4EFgQUhsAvRcPKWlomet/d2CZCPigIel4wHwYDVR0jBBgwFoAUhsAvRcPKWlomet/d2CZCPigIel4wDwYDVR0TAQH/BA\
    UwAwEB/zAzBgNVHREELDAqggxvcHMub3BlcmF0b3KGGnNwaWZmZTovL2Mva3ZncnBjL2NvbnN1bWVyMAUGAytlcANBAIp/XsQqRyAonmdAEbXn\
    UKzYr+fMNFCCumvv+SJN0OtcCUiW/Sar34y8uCmRV06iIBetoYzahlCG/xxhFoUMkww=";
// email:x@y.consumer,DNS:ops.operator
const EMAIL_THEN_DNS: &str = "\
    MIIBaDCCARqgAwIBAgIUcEvWTKAcVenSsjaPv6WMypET++wwBQYDK2VwMBUxEzARBgNVBAMMCmEub3BlcmF0b3IwIBcNMjYxMTI2MTQyOTQyWh\
    gPMjEyNjExMDIxNDI5NDJaMBUxEzARBgNVBAMMCmEub3BlcmF0b3IwKjAFBgMrZXADIQBt/yFKAPBvVeu54sufb90Pc9I/ceIXefIf9vg2+Ca3\
    yKN6MHgwHQYDVR0OBBYEFDke0t7mmErNEsBNBSGlil9DB/JGMB8GA1UdIwQYMBaAFDke0t7mmErNEsBNBSGlil9DB/JGMA8GA1UdEwEB/wQFMA\
    MBAf8wJQYDVR0RBB4wHIEMeEB5LmNvbnN1bWVyggxvcHMub3BlcmF0b3IwBQYDK2VwA0EA+ZL4gNQFZupEsv/YEdOImFRJLyEKKHuOAeTZ67qo\
    i1PS+8VsYF+rxE1dEe4DJqe2MexHSbJCKuHEquLAChMkBQ==";
// DNS:a_b.example,DNS:*.example,IP:10.0.0.1,IP:::1,RID:1.2.3.4,otherName:1.2.3.4;UTF8:other.operator,email:x@y,URI:spiffe://c/rank,DNS:ops.operator
const MANY: &str = "\
    MIIBwDCCAXKgAwIBAgIUUJNUXi4BuNHx9Fiyz0grhszAF/gwBQYDK2VwMBUxEzARBgNVBAMMCmEub3BlcmF0b3IwIBcNMjYxMTI2MTQyOTQyWh\
    gPMjEyNjExMDIxNDI5NDJaMBUxEzARBgNVBAMMCmEub3BlcmF0b3IwKjAFBgMrZXADIQCznm2fvNyd8Nef/9ERJLU2bzTl6FtMcQ0i6K6PeEbE\
    2KOB0TCBzjAdBgNVHQ4EFgQURLXa5z6+icoWlMzobaukELOQaAkwHwYDVR0jBBgwFoAURLXa5z6+icoWlMzobaukELOQaAkwDwYDVR0TAQH/BA\
    UwAwEB/zB7BgNVHREEdDByggthX2IuZXhhbXBsZYIJKi5leGFtcGxlhwQKAAABhxAAAAAAAAAAAAAAAAAAAAABiAMqAwSgFwYDKgMEoBAMDm90\
    aGVyLm9wZXJhdG9ygQN4QHmGD3NwaWZmZTovL2MvcmFua4IMb3BzLm9wZXJhdG9yMAUGAytlcANBAAdteH/z+PT0ATZdXe3GLXcSJj1heM+Spi\
    fNxWJWa53AW2PcxYJPFDmwT9wkDwu+xiZ60JxlgE5UXqVZpegEAAE=";
// None.
const NO_NAMES: &str = "\
    MIIBQDCB86ADAgECAhR4lnMAuxBD+2E/Dmli6yKLWZ/BBDAFBgMrZXAwFTETMBEGA1UEAwwKYS5vcGVyYXRvcjAgFw0yNjExMjYxNDI5NDJaGA\
    8yMTI2MTEwMjE0Mjk0MlowFTETMBEGA1UEAwwKYS5vcGVyYXRvcjAqMAUGAytlcAMhAKasfX92BFGuI7yS1pNs6Jc+LZG9E7nNCDuA+/dait39\
    o1MwUTAdBgNVHQ4EFgQU0t/ntuE81/N7M180exHf7OJBFfMwHwYDVR0jBBgwFoAU0t/ntuE81/N7M180exHf7OJBFfMwDwYDVR0TAQH/BAUwAw\
    EB/zAFBgMrZXADQQBQeOK9+IOqOt1aWc6CDglPp456nNvN2DjpuxTSjEC6HPx2sT3sguHBxMGC1eqa6dnXtbzDCOSaWUJuXKS7HQoH";

fn certificate(text: &str) -> Vec<u8> {
    BASE64_STANDARD.decode(text).unwrap()
}

fn named(text: &str) -> Option<String> {
    who_is_named(&names_in(&certificate(text)).unwrap()).map(|(role, name)| format!("{role}, {name}"))
}

#[test]
fn a_certificate_gives_the_role_of_its_first_name_that_has_one_of_whatever_kind() {
    let consumer = "consumer, certificate spiffe://c/kvgrpc/consumer";
    assert_eq!(named(URI_THEN_DNS).as_deref(), Some(consumer));
    assert_eq!(named(DNS_THEN_URI).as_deref(), Some("operator, certificate ops.operator"));
    assert_eq!(named(EMAIL_THEN_DNS).as_deref(), Some("consumer, certificate x@y.consumer"));
    let names = names_in(&certificate(MANY)).unwrap();
    assert_eq!(names, ["a_b.example", "*.example", "x@y", "spiffe://c/rank", "ops.operator"]);
    assert_eq!(named(MANY).as_deref(), Some("rank, certificate spiffe://c/rank"));
    assert_eq!((names_in(&certificate(NO_NAMES)), named(NO_NAMES)), (Some(Vec::new()), None));
}

#[test]
fn what_is_no_certificate_has_no_names() {
    let whole = certificate(URI_THEN_DNS);
    assert!((0..whole.len()).all(|end| names_in(&whole[..end]).is_none()));
    assert!(names_in(&[&whole[..], b"\0"].concat()).is_none());
    // Whatever one byte of it says: it is read or is not, and names begin and end within it.
    for (at, value) in (0..whole.len()).flat_map(|at| (0..=255).map(move |value| (at, value))) {
        let mut other = whole.clone();
        other[at] = value;
        let told: usize = names_in(&other).iter().flatten().map(|name| name.chars().count()).sum();
        assert!(told < whole.len());
    }
    for length in [&b"\x80"[..], b"\x81\x01", b"\x82\0\x80", b"\x83\x01\0\0", b"\x84\xff\xff\xff\xff", b"\xff"] {
        assert!(names_in(&[b"\x30", length].concat()).is_none());
    }
}

#[test]
fn names_that_are_said_twice_or_are_of_no_known_kind_are_refused() {
    let names = |list: &[u8]| element(0x30, &[element(0x06, b"\x55\x1d\x11"), element(0x04, list)].concat());
    let told = |extensions: &[u8]| {
        let fields = element(0xa3, &element(0x30, extensions));
        names_in(&element(0x30, &element(0x30, &fields)))
    };
    let (dns, latin) = (names(&element(0x30, b"\x82\x04rank")), names(&element(0x30, b"\x81\x01\xe9")));
    assert_eq!((told(&dns), told(&latin)), (Some(vec!["rank".to_owned()]), Some(vec!["é".to_owned()])));
    assert_eq!(told(&[dns.clone(), dns].concat()), None);
    assert_eq!(told(&names(&element(0x30, b"\xa2\x04rank"))), None);
    assert_eq!(told(&names(&element(0x30, b"\x82\x05rank"))), None);
    assert_eq!(told(&names(b"\x82\x04rank")), None);
}

fn element(tag: u8, value: &[u8]) -> Vec<u8> {
    [&[tag, u8::try_from(value.len()).unwrap()], value].concat()
}
