//! As whom a process is at etcd: flags, and the files that they name. Files are read once at the start, so that a wrong
//! one is an error there, and again for each connection: certificates and passwords may change.
use std::convert::Infallible;
use std::fmt::{self, Display};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use tandem_ports::pem;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::address::EtcdAddress;

/// Bytes of a password at most.
const MAX_PASSWORD: u64 = 1024;
/// What a password's place begins with, if it is a variable.
const VARIABLE: &str = "env:";

/// Their flags.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct EtcdArgs {
    /// Authorities of etcd's certificate, PEM, for etcds:// [default: those of the system]
    #[arg(long, value_name = "FILE")]
    pub etcd_ca: Option<PathBuf>,
    /// Certificate to show to etcd, PEM, for etcds://. These files are read again for each connection
    #[arg(long, value_name = "FILE", requires = "etcd_key")]
    pub etcd_cert: Option<PathBuf>,
    /// That certificate's private key, PEM
    #[arg(long, value_name = "FILE", requires = "etcd_cert")]
    pub etcd_key: Option<PathBuf>,
    /// User at etcd, who may read the prefix, and for a router write there
    #[arg(long, value_name = "NAME", requires = "etcd_password", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub etcd_user: Option<String>,
    /// File with that user's password, one line, or the name of a variable that holds it
    #[arg(long, value_name = "FILE|env:NAME", requires = "etcd_user")]
    pub etcd_password: Option<PasswordSource>,
}

/// The value of `--etcd-password`: where it is, and never what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PasswordSource {
    /// A file with one line.
    File(PathBuf),
    /// A variable of this name.
    Variable(String),
}

impl FromStr for PasswordSource {
    type Err = Infallible;

    fn from_str(value: &str) -> Result<Self, Infallible> {
        Ok(match value.strip_prefix(VARIABLE) {
            Some(name) => Self::Variable(name.to_owned()),
            None => Self::File(value.into()),
        })
    }
}

impl Display for PasswordSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Variable(name) => write!(f, "{VARIABLE}{name}"),
        }
    }
}

impl PasswordSource {
    fn read(&self) -> anyhow::Result<String> {
        let text = match self {
            Self::File(path) => line(path),
            Self::Variable(name) => {
                let value = std::env::var_os(name).context("no such variable");
                value.and_then(|value| value.into_string().map_err(|_| anyhow::anyhow!("not UTF-8")))
            }
        };
        let text = text.and_then(|text| {
            let text = text.trim_end_matches(['\r', '\n']);
            if text.is_empty() { bail!("it is empty") } else { Ok(text.to_owned()) }
        });
        text.with_context(|| format!("--etcd-password {self}"))
    }
}

fn line(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(MAX_PASSWORD + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_PASSWORD { bail!("more than {MAX_PASSWORD} bytes") } else { Ok(text) }
}

/// A place in etcd, and who one is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Etcd {
    /// Where.
    pub address: EtcdAddress,
    args: EtcdArgs,
}

/// What the files hold now. It has no `Debug`: it is secret.
pub(crate) struct Access {
    pub(crate) tls: Option<Arc<ClientConfig>>,
    pub(crate) user: Option<(String, String)>,
}

impl Etcd {
    /// With these flags.
    ///
    /// # Errors
    /// The first file that cannot be used, or files of TLS for an address without.
    pub fn new(address: EtcdAddress, args: EtcdArgs) -> anyhow::Result<Self> {
        let etcd = Self { address, args };
        etcd.access()?;
        Ok(etcd)
    }

    /// Reads the files.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(crate) fn access(&self) -> anyhow::Result<Access> {
        let EtcdArgs { etcd_ca, etcd_cert, etcd_key, etcd_user, etcd_password } = &self.args;
        let pair = etcd_cert.as_deref().zip(etcd_key.as_deref());
        let tls = match self.address.tls {
            true => Some(Arc::new(client(etcd_ca.as_deref(), pair)?)),
            false if etcd_ca.is_some() || pair.is_some() => {
                bail!("--etcd-ca and --etcd-cert are for TLS: write etcds://… instead of {}", self.address)
            }
            false => None,
        };
        let password = etcd_password.as_ref().map(PasswordSource::read).transpose()?;
        Ok(Access { tls, user: etcd_user.clone().zip(password) })
    }
}

fn client(ca: Option<&Path>, pair: Option<(&Path, &Path)>) -> anyhow::Result<ClientConfig> {
    let roots = match ca {
        Some(ca) => pem::roots(ca).context("--etcd-ca")?,
        None => of_the_system()?,
    };
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions()?.with_root_certificates(roots);
    let mut config = match pair {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => {
            let (certs, key) =
                (pem::certificates(cert).context("--etcd-cert")?, pem::private_key(key).context("--etcd-key")?);
            builder.with_client_auth_cert(certs, key).context("--etcd-cert and --etcd-key do not belong together")?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

fn of_the_system() -> anyhow::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        bail!("this system has no authorities: name etcd's by --etcd-ca");
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        args: EtcdArgs,
    }

    fn args(flags: &str) -> Result<EtcdArgs, clap::Error> {
        Flags::try_parse_from(["p"].into_iter().chain(flags.split_whitespace())).map(|flags| flags.args)
    }

    fn access(address: &str, args: EtcdArgs) -> anyhow::Result<Access> {
        Etcd::new(address.parse().unwrap(), args)?.access()
    }

    #[test]
    fn a_password_is_a_line_of_a_file_or_a_variable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("password");
        let flags = format!("--etcd-user tandem --etcd-password {}", path.display());
        let missing = access("etcd://h/p", args(&flags).unwrap()).err().unwrap();
        assert!(format!("{missing:#}").contains("--etcd-password /"), "{missing:#}");
        std::fs::write(&path, "ge heim\n").unwrap();
        let etcd = Etcd::new("etcd://h/p".parse().unwrap(), args(&flags).unwrap()).unwrap();
        assert_eq!(etcd.access().unwrap().user, Some(("tandem".into(), "ge heim".into())));
        assert!(!format!("{etcd:?}").contains("heim"), "{etcd:?}");
        for wrong in ["", "\n", &"x".repeat(1025)] {
            std::fs::write(&path, wrong).unwrap();
            assert!(etcd.access().is_err(), "{wrong}");
        }
        let flags = args("--etcd-user tandem --etcd-password env:NO_SUCH_VARIABLE").unwrap();
        let missing = access("etcd://h/p", flags).err().unwrap();
        assert_eq!(format!("{missing:#}"), "--etcd-password env:NO_SUCH_VARIABLE: no such variable");
        let home = access("etcd://h/p", args("--etcd-user u --etcd-password env:PATH").unwrap()).unwrap();
        assert!(home.user.is_some());
    }

    #[test]
    fn flags_that_belong_together_come_together() {
        for half in ["--etcd-user u", "--etcd-password f", "--etcd-cert c", "--etcd-key k"] {
            assert!(args(half).is_err(), "{half}");
        }
        assert_eq!(args("").unwrap(), EtcdArgs::default());
        let error = access("etcd://h/p", args("--etcd-ca ca.pem").unwrap()).err().unwrap();
        assert!(error.to_string().contains("etcds://"), "{error}");
    }

    #[test]
    fn files_of_tls_are_read_at_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let issued = rcgen::generate_simple_self_signed(["etcd.test".to_owned()]).unwrap();
        std::fs::write(path("ca.pem"), issued.cert.pem()).unwrap();
        std::fs::write(path("key.pem"), issued.signing_key.serialize_pem()).unwrap();
        let flags = |cert: &str, key: &str| EtcdArgs {
            etcd_ca: Some(path("ca.pem")),
            etcd_cert: Some(path(cert)),
            etcd_key: Some(path(key)),
            ..EtcdArgs::default()
        };
        let tls = access("etcds://h/p", flags("ca.pem", "key.pem")).unwrap().tls.unwrap();
        assert_eq!(tls.alpn_protocols, [b"h2"]);
        for (cert, key, flag) in [("no.pem", "key.pem", "--etcd-cert"), ("ca.pem", "ca.pem", "--etcd-key")] {
            let error = access("etcds://h/p", flags(cert, key)).err().unwrap();
            assert!(error.to_string().contains(flag), "{error:#}");
        }
    }
}
