//! Whom a process takes for its peer when it calls: the chain is webpki's matter, as with any server, and in place of
//! the DNS name it is the certificate's own name that counts. And what went wrong, in words.
use std::fmt;
use std::io;
use std::sync::Arc;

use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::verify_server_cert_signed_by_trust_anchor;
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{
    AlertDescription, CertificateError, DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme,
};
use webpki::EndEntityCert;

use crate::peer_name::{PeerName, Policy, Wanted};

/// Takes a server whose chain is good and who is whom is wanted.
#[derive(Debug)]
pub(crate) struct PeerVerifier {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
    policy: Policy,
    wanted: Wanted,
}

impl PeerVerifier {
    pub fn new(roots: Arc<RootCertStore>, provider: Arc<CryptoProvider>, policy: Policy, wanted: Wanted) -> Self {
        Self { roots, provider, policy, wanted }
    }
}

impl ServerCertVerifier for PeerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let cert = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&cert, &self.roots, intermediates, now, algorithms)?;
        let name = self::name(end_entity);
        let name = name.as_ref().map(Option::as_ref).map_err(String::as_str);
        self.policy.check(name, &self.wanted).map_err(WrongName::refused)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// The name that a certificate has.
pub(crate) fn name(cert: &CertificateDer<'_>) -> Result<Option<PeerName>, String> {
    let cert = EndEntityCert::try_from(cert).map_err(|error| error.to_string())?;
    PeerName::among(cert.valid_uri_names())
}

/// The chain is good, and the certificate is somebody else's.
#[derive(Debug)]
struct WrongName(String);

impl WrongName {
    fn refused(why: String) -> Error {
        Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(Self(why)))))
    }
}

impl fmt::Display for WrongName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongName {}

/// The same error, in words, if it is one of TLS.
pub(crate) fn described(error: io::Error) -> io::Error {
    match error.get_ref().and_then(|error| error.downcast_ref::<Error>()) {
        Some(tls) => io::Error::new(error.kind(), describe(tls)),
        None => error,
    }
}

/// What went wrong in a handshake.
pub(crate) fn describe(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(why) => of_certificate("its certificate", why),
        Error::NoCertificatesPresented => "it shows no certificate".to_owned(),
        Error::InvalidMessage(_) => "what it says is no TLS".to_owned(),
        Error::AlertReceived(alert) => of_alert(*alert),
        error => error.to_string(),
    }
}

/// What is wrong with this certificate.
pub(crate) fn of_certificate(it: &str, why: &CertificateError) -> String {
    use CertificateError as Why;
    match why {
        Why::UnknownIssuer | Why::BadSignature => format!("no authority of --node-tls-ca signed {it}"),
        Why::Expired | Why::ExpiredContext { .. } => format!("{it} is not valid any more ({why})"),
        Why::NotValidYet | Why::NotValidYetContext { .. } => format!("{it} is not valid yet ({why})"),
        Why::InvalidPurpose | Why::InvalidPurposeContext { .. } => {
            format!("{it} needs both serverAuth and clientAuth as extended key usage ({why})")
        }
        Why::Other(OtherError(why)) if why.is::<WrongName>() => why.to_string(),
        Why::Other(OtherError(why)) => format!("{it} cannot be used: {why}"),
        why => format!("{it} cannot be used: {why}"),
    }
}

/// The other end's last word.
fn of_alert(alert: AlertDescription) -> String {
    let why = match alert {
        AlertDescription::CertificateRequired => "it wants a certificate (--node-tls-cert)",
        // The second one of an authority that has the name of another one.
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "it does not know the authority of this process's certificate"
        }
        AlertDescription::CertificateExpired => "this process's certificate is not valid any more, or not yet",
        AlertDescription::BadCertificate | AlertDescription::CertificateUnknown | AlertDescription::AccessDenied => {
            "it refuses this process's certificate"
        }
        _ => "it ends the handshake",
    };
    format!("{why} ({alert:?})")
}
