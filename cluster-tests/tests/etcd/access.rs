//! How etcd is reached: within TLS with certificates of both sides, as a user with a password, and not before it is
//! there; by whichever member answers.
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;
use etcd_client::{Client, ConnectOptions, Permission};
use futures::future::join_all;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tandem_cluster_tests::routers::until;
use tandem_etcd::register::{Registered, Standing, TTL};
use tandem_etcd::watch::Watched;
use tandem_etcd::{Etcd, EtcdArgs, HostPort};
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};

use super::SOON;
use super::server::{EtcdServer, PREFIX};

const PASSWORD: &str = "ge heim";

/// Certificates of server and client, and their authority, which is written beside them; and a foreign authority.
fn issue(dir: &Path) -> anyhow::Result<()> {
    let authority = |file: &str| {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        fs::write(dir.join(file), issuer.pem())?;
        anyhow::Ok(issuer)
    };
    let issuer = authority("ca.pem")?;
    authority("foreign.pem")?;
    for name in ["server", "client"] {
        let mut params = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        fs::write(dir.join(format!("{name}.pem")), params.signed_by(&key, &issuer)?.pem())?;
        fs::write(dir.join(format!("{name}.key")), key.serialize_pem())?;
    }
    Ok(())
}

/// From now on only the user `tandem` may read and write the prefix.
async fn with_users(client: &mut Client) -> Result<(), etcd_client::Error> {
    for user in ["root", "tandem"] {
        client.user_add(user, PASSWORD, None).await?;
        client.role_add(user).await?;
        client.user_grant_role(user, user).await?;
    }
    client.role_grant_permission("tandem", Permission::read_write(PREFIX).with_prefix()).await?;
    client.auth_enable().await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_who_has_a_certificate_and_the_password_is_at_etcd() -> anyhow::Result<()> {
    let Some(etcd) = EtcdServer::new()? else { return Ok(()) };
    let mut etcd = etcd.with_tls();
    issue(etcd.dir())?;
    let path = |name: &str| etcd.dir().join(name);
    for (file, text) in [("password", PASSWORD), ("wrong", "another")] {
        fs::write(path(file), format!("{text}\n"))?;
    }
    let args = |ca: &str, password: &str, client: bool| EtcdArgs {
        etcd_ca: Some(path(ca)),
        etcd_cert: client.then(|| path("client.pem")),
        etcd_key: client.then(|| path("client.key")),
        etcd_user: Some("tandem".to_owned()),
        etcd_password: path(password).to_str().and_then(|path| path.parse().ok()),
    };
    let [good, foreign, nobody, wrong] = [
        args("ca.pem", "password", true),
        args("foreign.pem", "password", true),
        args("ca.pem", "password", false),
        args("ca.pem", "wrong", true),
    ];
    etcd.start().await?;
    with_users(&mut etcd.client().await?).await?;
    let at = |args: EtcdArgs| Etcd::new(etcd.tls_address().parse()?, args);
    let mut watched = Watched::start(at(good.clone())?);
    assert!(timeout(SOON, watched.changed()).await?.is_empty());
    // These come first, and stand there never.
    let mut refused = Vec::new();
    for (number, args) in [foreign, nobody, wrong].into_iter().enumerate() {
        refused.push(register(at(args)?, &format!("10.0.0.9:{}", number + 1)));
    }
    let registered = register(at(good)?, "10.0.0.1:8002");
    let there = timeout(SOON, watched.changed()).await?;
    assert_eq!(there.values().collect::<Vec<_>>(), ["10.0.0.1:8002"]);
    registered.leave().await;
    assert!(timeout(SOON, watched.changed()).await?.is_empty(), "the others are still outside");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_may_come_last() -> anyhow::Result<()> {
    let Some(mut etcd) = EtcdServer::new()? else { return Ok(()) };
    // The first member of the address is nobody.
    let text = etcd.address().replacen("://", "://127.0.0.1:1,", 1);
    let at = || Etcd::new(text.parse()?, EtcdArgs::default());
    let standing = Standing::new(&text.parse()?);
    let is_there = || standing.is_there(Instant::now());
    let mut watched = Watched::start(at()?);
    let registered = Registered::start(at()?, &address("[::1]:9"), standing.clone());
    ensure!(!is_there());
    etcd.start().await?;
    let stands = async || Ok(etcd.entries().await?.contains_key(&format!("{PREFIX}[::1]:9")));
    until(SOON, "the address stands in etcd", stands).await?;
    let mut there = timeout(SOON, watched.changed()).await?;
    if there.is_empty() {
        there = timeout(SOON, watched.changed()).await?;
    }
    assert_eq!(there.iter().collect::<Vec<_>>(), [(&"[::1]:9".to_owned(), &"[::1]:9".to_owned())]);
    until(SOON, "the metric says so", async || Ok(is_there())).await?;
    registered.leave().await;
    assert!(timeout(SOON, watched.changed()).await?.is_empty() && !is_there());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_answers_nothing_is_passed_over() -> anyhow::Result<()> {
    let Some(mut etcd) = EtcdServer::new()? else { return Ok(()) };
    etcd.start().await?;
    // Its kernel takes connections, as that of a stopped process does.
    let still = TcpListener::bind("127.0.0.1:0").await?;
    let text = etcd.address().replacen("://", &format!("://{},", still.local_addr()?), 1);
    let at = || Etcd::new(text.parse()?, EtcdArgs::default());
    // Each has an order of its own: most likely some begin with the one, and some with the other.
    let mut registered = Vec::new();
    for number in 1..=12 {
        registered.push(register(at()?, &format!("10.0.0.1:{number}")));
    }
    let stands = async |number| Ok(etcd.entries().await?.len() == number);
    until(SOON, "all addresses stand in etcd", async || stands(12).await).await?;
    let begun = Instant::now();
    join_all(registered.into_iter().map(Registered::leave)).await;
    // A slow etcd may take one or two too late, and those keys end with their leases. So would half of them if they
    // waited for the silent member.
    until(SOON, "the addresses are gone", async || Ok(etcd.entries().await?.len() <= 2)).await?;
    ensure!(begun.elapsed() < TTL / 2, "they left by themselves after {:?}", begun.elapsed());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_etcd_has_forgotten_is_no_outage() -> anyhow::Result<()> {
    let Some(etcd) = EtcdServer::new()? else { return Ok(()) };
    // A list of the watcher's is the next call with its token after a long while: here, after more than a second.
    let mut etcd = etcd.with_flag("--auth-token-ttl", "1");
    etcd.start().await?;
    with_users(&mut etcd.client().await?).await?;
    let password = etcd.dir().join("password");
    fs::write(&password, PASSWORD)?;
    let args = EtcdArgs {
        etcd_user: Some("tandem".to_owned()),
        etcd_password: password.to_str().and_then(|path| path.parse().ok()),
        ..EtcdArgs::default()
    };
    let mut watched = Watched::start(Etcd::new(etcd.address().parse()?, args)?);
    assert!(timeout(SOON, watched.changed()).await?.is_empty());
    // The list comes before the watch.
    until(SOON, "the watch has begun", async || Ok(etcd.calls("Watch").await? >= 1)).await?;
    let watches = etcd.calls("Watch").await?;
    let root = Some(ConnectOptions::new().with_user("root", PASSWORD));
    for number in 1..=3 {
        sleep(Duration::from_secs(4)).await;
        etcd.client_as(root.clone()).await?.put(format!("{PREFIX}{number}"), "10.0.0.1:1", None).await?;
        assert_eq!(timeout(SOON, watched.changed()).await?.len(), number);
    }
    assert_eq!(etcd.calls("Watch").await?, watches, "the watch was begun anew");
    Ok(())
}

fn register(etcd: Etcd, text: &str) -> Registered {
    let standing = Standing::new(&etcd.address);
    Registered::start(etcd, &address(text), standing)
}

fn address(text: &str) -> HostPort {
    text.parse().expect("an address")
}
