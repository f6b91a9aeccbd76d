//! Whom a client's certificate is for: its SPIFFE ID, and the common name of its subject. rustls does not show either,
//! and webpki shows a subject as DER alone. What the names mean is the program's matter.
use std::sync::{Arc, OnceLock};

use tokio_rustls::rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

use crate::peer_name::spiffe_id;

/// The DER of an object identifier: `id-at-commonName`, 2.5.4.3 (RFC 5280, A.1).
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
/// DER's tags: of a `SET`, a `SEQUENCE`, an object identifier.
const SET: u8 = 0x31;
const SEQUENCE: u8 = 0x30;
const OBJECT_ID: u8 = 0x06;
/// Of `UTF8String`, `PrintableString`, `IA5String`: strings that are UTF-8, too.
const STRINGS: [u8; 3] = [0x0c, 0x13, 0x16];

/// The names in the certificate of a client, whose chain was verified. Each call and request on its connection carries
/// them among its extensions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientName {
    /// The certificate's only URI, if it is one of SPIFFE's.
    pub spiffe_id: Option<String>,
    /// The only common name of its subject.
    pub common_name: Option<String>,
}

impl ClientName {
    /// The names in a certificate, whose signature is not checked here. Bytes that are no certificate have none.
    pub fn of(cert: &CertificateDer<'_>) -> Self {
        let Ok(cert) = EndEntityCert::try_from(cert) else { return Self::default() };
        let spiffe_id = spiffe_id(cert.valid_uri_names()).ok().flatten().map(str::to_owned);
        Self { spiffe_id, common_name: common_name(cert.subject()).map(str::to_owned) }
    }
}

/// Who is at the other end of a connection, once its handshake is over.
#[derive(Clone, Debug, Default)]
pub(crate) struct Client(Arc<OnceLock<ClientName>>);

impl Client {
    /// The handshake is over, and the client's certificate was good.
    pub fn is_of(&self, certs: Option<&[CertificateDer<'_>]>) {
        if let Some(cert) = certs.and_then(<[_]>::first) {
            let _ = self.0.set(ClientName::of(cert));
        }
    }

    pub fn name(&self) -> Option<&ClientName> {
        self.0.get()
    }
}

/// The common name in the content of a subject: `SET`s of `SEQUENCE`s of an object identifier and a string (RFC 5280,
/// 4.1.2.4). Of several none counts: which one is meant cannot be known.
fn common_name(mut subject: &[u8]) -> Option<&str> {
    let mut found = None;
    while !subject.is_empty() {
        let mut set = element(&mut subject, &[SET])?;
        while !set.is_empty() {
            let mut pair = element(&mut set, &[SEQUENCE])?;
            if element(&mut pair, &[OBJECT_ID])? == COMMON_NAME {
                let name = std::str::from_utf8(element(&mut pair, &STRINGS)?).ok()?;
                if found.replace(name).is_some() {
                    return None;
                }
            }
        }
    }
    found
}

/// Takes the first element, of one of these tags, and returns its content.
fn element<'a>(bytes: &mut &'a [u8], tags: &[u8]) -> Option<&'a [u8]> {
    let (tag, rest) = bytes.split_first()?;
    let (length, rest) = length(rest)?;
    let (content, rest) = rest.split_at_checked(length)?;
    *bytes = rest;
    tags.contains(tag).then_some(content)
}

/// In one byte, or in one or two behind that which says so: a certificate is not longer.
fn length(bytes: &[u8]) -> Option<(usize, &[u8])> {
    match bytes {
        [length @ ..=0x7f, rest @ ..] => Some((usize::from(*length), rest)),
        [0x81, length, rest @ ..] => Some((usize::from(*length), rest)),
        [0x82, high, low, rest @ ..] => Some((usize::from(u16::from_be_bytes([*high, *low])), rest)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};

    use super::*;

    fn cert(uris: &[&str], names: &[(DnType, &str)]) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let uri = |uri: &&str| SanType::URI((*uri).try_into().unwrap());
        params.subject_alt_names.extend(uris.iter().map(uri));
        params.distinguished_name = DistinguishedName::new();
        names.iter().for_each(|(kind, name)| params.distinguished_name.push(kind.clone(), *name));
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    fn names(uris: &[&str], names: &[(DnType, &str)]) -> (Option<String>, Option<String>) {
        let ClientName { spiffe_id, common_name } = ClientName::of(&cert(uris, names));
        (spiffe_id, common_name)
    }

    #[test]
    fn a_certificate_names_its_client() {
        let (id, long) = ("spiffe://example.org/team/a", "x".repeat(300));
        let organization = (DnType::OrganizationName, "Example");
        assert_eq!(names(&[id], &[]), (Some(id.to_owned()), None));
        let common = |name: &str| (None, Some(name.to_owned()));
        assert_eq!(names(&[], &[organization.clone(), (DnType::CommonName, "team a")]), common("team a"));
        assert_eq!(names(&[], &[(DnType::CommonName, &long), organization]), common(&long));
        assert_eq!(names(&["https://example.org/a"], &[]), (None, None));
        assert_eq!(names(&[id, "https://example.org/a"], &[]), (None, None), "which one is meant?");
        assert_eq!(ClientName::of(&CertificateDer::from(vec![1, 2, 3])), ClientName::default());
    }

    #[test]
    fn a_subject_of_any_bytes_is_read_or_left() {
        let pair =
            |name: &[u8]| [&[SEQUENCE, 7 + name.len() as u8, 6, 3, 0x55, 4, 3, 12, name.len() as u8], name].concat();
        let set = |pairs: &[u8]| [&[SET, pairs.len() as u8], pairs].concat();
        let one = set(&pair(b"alice"));
        assert_eq!(common_name(&one), Some("alice"));
        assert_eq!(common_name(&[one.clone(), one.clone()].concat()), None, "two of them");
        assert_eq!(common_name(&set(&[pair(b"a"), pair(b"b")].concat())), None, "two of them");
        assert_eq!(common_name(&set(&pair(b"\xff"))), None, "no UTF-8");
        for cut in 0..one.len() {
            assert_eq!(common_name(&one[..cut]), None, "{cut}");
        }
        for (at, byte) in (0..one.len()).flat_map(|at| (0..=255).map(move |byte| (at, byte))) {
            let mut changed = one.clone();
            changed[at] = byte;
            // Never a panic, and never a name that is not there.
            assert!(common_name(&changed).is_none_or(|name| name.len() <= 5));
        }
    }
}
