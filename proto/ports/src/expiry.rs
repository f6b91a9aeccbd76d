//! When a certificate chain is good no more, for metrics. webpki does not tell the dates of a certificate, but that of
//! its end when it refuses one as expired: so each is shown to it at a time when all are.
use std::time::Duration;

use tokio_rustls::rustls::pki_types::{CertificateDer, UnixTime};
use webpki::{EndEntityCert, Error, KeyUsage};

/// The first second after the year 9999, in which a certificate without an end has its end (RFC 5280, 4.1.2.5).
const AFTER_ALL: Duration = Duration::from_secs(253_402_300_800);

/// The Unix second at which the first of these ends. `None`: one of them is no certificate.
pub(crate) fn not_after(chain: &[CertificateDer<'_>]) -> Option<u64> {
    chain.iter().map(of_one).min().flatten()
}

fn of_one(cert: &CertificateDer<'_>) -> Option<u64> {
    let cert = EndEntityCert::try_from(cert).ok()?;
    let at = UnixTime::since_unix_epoch(AFTER_ALL);
    // Its dates are looked at before anything else.
    match cert.verify_for_usage(&[], &[], &[], at, KeyUsage::server_auth(), None, None) {
        Err(Error::CertExpired { not_after, .. }) => Some(not_after.as_secs()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    fn until(year: i32) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.not_after = date_time_ymd(year, 1, 1);
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn the_first_end_of_a_chain_counts() {
        assert_eq!(not_after(&[until(2030)]), Some(1_893_456_000));
        assert_eq!(not_after(&[until(2040), until(2030)]), Some(1_893_456_000));
        assert_eq!(not_after(&[until(2020)]), Some(1_577_836_800), "one that has ended too");
        assert_eq!(not_after(&[until(9999)]), Some(253_370_764_800));
        assert_eq!(not_after(&[until(2030), CertificateDer::from(vec![1, 2, 3])]), None);
        assert_eq!(not_after(&[]), None);
    }
}
