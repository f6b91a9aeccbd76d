//! Whose request it is: the name under which it is counted, and what that name may have.
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tandem_proto::{Error, MAX_PRIORITY};

use super::limiter::{Allowance, Exceeded, Limiter, Rates};

/// Who says nothing is this one.
pub const DEFAULT_TENANT: &str = "default";
/// A weight at most.
pub const MAX_WEIGHT: u32 = 1000;
/// Bytes of a name at most.
const MAX_NAME_BYTES: usize = 64;

/// What a tenant may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Share of the service against other tenants', 1 to [`MAX_WEIGHT`].
    pub weight: u32,
    /// The most urgent priority that its requests may ask for; higher is more urgent, unlike `min_priority` in the file
    /// of keys.
    pub max_priority: i32,
    /// What it may ask for in a minute.
    pub rates: Rates,
    /// Answers that may run and wait at a time; `None` is no limit.
    pub max_concurrent_requests: Option<u32>,
    /// Whether it reuses cached KV of the other tenants that do, and they its.
    pub shares_cache: bool,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            weight: 1,
            max_priority: MAX_PRIORITY,
            rates: Rates::default(),
            max_concurrent_requests: None,
            shares_cache: true,
        }
    }
}

/// One tenant. Clones are the same one: they share its rate limits.
#[derive(Clone, Debug)]
pub struct Tenant(Arc<Account>);

#[derive(Debug)]
struct Account {
    name: Arc<str>,
    terms: Terms,
    limiter: Mutex<Option<Limiter>>,
    /// Answers that run and wait.
    concurrent: AtomicU32,
}

/// A tenant has as many answers that run and wait as it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crowded {
    /// How many that is.
    pub most: u32,
    /// And how many more were asked for at once.
    pub asked: u32,
}

impl Default for Tenant {
    fn default() -> Self {
        Self::new(DEFAULT_TENANT, Terms::default(), None)
    }
}

impl Tenant {
    /// A tenant with full buckets. `now` is `None` for one without rate limits.
    pub fn new(name: &str, terms: Terms, now: Option<Instant>) -> Self {
        let limiter = now.map(|now| Limiter::new(terms.rates, now));
        let (limiter, concurrent) = (Mutex::new(limiter), AtomicU32::default());
        Self(Arc::new(Account { name: name.into(), terms, limiter, concurrent }))
    }

    /// The tenant that a client names itself, where there are no keys.
    ///
    /// # Errors
    /// `InvalidArgument` for what is no name.
    pub fn named(name: &str) -> Result<Self, Error> {
        check_name(name).map_err(|why| Error::invalid("x-tandem-tenant", format!("x-tandem-tenant: {why}")))?;
        Ok(Self::new(name, Terms::default(), None))
    }

    /// For people and metrics.
    pub fn name(&self) -> &Arc<str> {
        &self.0.name
    }

    /// What it may have.
    pub fn terms(&self) -> Terms {
        self.0.terms
    }

    /// Takes so many requests and tokens from its rates: all of it or nothing.
    ///
    /// # Errors
    /// Which rate was too high, and for how long it will be.
    pub fn take(&self, requests: u32, tokens: u64, now: Instant) -> Result<(), Exceeded> {
        self.limiter(|limiter| limiter.take(requests, tokens, now)).unwrap_or(Ok(()))
    }

    /// Whether the smallest request would be within its rates; takes nothing.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn could_take(&self, now: Instant) -> Result<(), Exceeded> {
        // On a copy.
        self.limiter(|limiter| limiter.clone().take(1, 1, now)).unwrap_or(Ok(()))
    }

    /// What is left of its rates; empty without any.
    pub fn allowances(&self, now: Instant) -> Vec<Allowance> {
        self.limiter(|limiter| limiter.allowances(now)).unwrap_or_default()
    }

    /// Gives back what was taken and not used.
    pub fn give_back(&self, requests: u32, tokens: u64, now: Instant) {
        self.limiter(|limiter| limiter.give_back(requests, tokens, now));
    }

    /// Takes what was used beyond what was taken.
    pub fn owe(&self, tokens: u64, now: Instant) {
        self.limiter(|limiter| limiter.owe(tokens, now));
    }

    /// So many answers run or wait from now on, until [`Self::end`]: all of them or none.
    ///
    /// # Errors
    /// They would be too many.
    pub fn begin(&self, requests: u32) -> Result<(), Crowded> {
        let most = self.most_concurrent();
        let with = |now: u32| now.checked_add(requests).filter(|all| *all <= most);
        let begun = self.0.concurrent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with);
        begun.map(drop).map_err(|_| Crowded { most, asked: requests })
    }

    /// So many of them are over.
    pub fn end(&self, requests: u32) {
        self.0.concurrent.fetch_sub(requests, Ordering::Relaxed);
    }

    /// Whether one more could begin; takes nothing.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn could_begin(&self) -> Result<(), Crowded> {
        let most = self.most_concurrent();
        if self.0.concurrent.load(Ordering::Relaxed) < most { Ok(()) } else { Err(Crowded { most, asked: 1 }) }
    }

    fn most_concurrent(&self) -> u32 {
        self.0.terms.max_concurrent_requests.unwrap_or(u32::MAX)
    }

    fn limiter<T>(&self, act: impl FnOnce(&mut Limiter) -> T) -> Option<T> {
        self.0.limiter.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map(act)
    }
}

/// A name is a label in metrics and logs.
///
/// # Errors
/// What a name is.
pub fn check_name(name: &str) -> Result<(), String> {
    let printable = name.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '"' | '\\'));
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !printable {
        return Err(format!(
            "a tenant's name has 1 to {MAX_NAME_BYTES} visible ASCII characters, none of them \" or \\"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn names_are_short_and_plain() {
        assert_eq!(&**Tenant::named("team-a").unwrap().name(), "team-a");
        for wrong in ["", "two words", "tab\t", "é", "quo\"te", &"x".repeat(65)] {
            assert_eq!(Tenant::named(wrong).unwrap_err().param, Some("x-tandem-tenant"), "{wrong:?}");
        }
    }

    #[test]
    fn clones_share_the_rates() {
        let now = Instant::now();
        let rates = Rates { requests_per_minute: Some(2), tokens_per_minute: None };
        let tenant = Tenant::new("a", Terms { rates, ..Terms::default() }, Some(now));
        assert_eq!((tenant.take(1, 1, now), tenant.clone().take(1, 1, now)), (Ok(()), Ok(())));
        assert_eq!(tenant.take(1, 1, now).unwrap_err().retry_after, Duration::from_secs(30));
        tenant.clone().give_back(1, 0, now);
        assert_eq!(tenant.take(1, 1, now), Ok(()));
        assert_eq!(Tenant::default().take(1, u64::MAX, now), Ok(()));
    }

    #[test]
    fn no_more_run_and_wait_than_may() {
        let terms = Terms { max_concurrent_requests: Some(3), ..Terms::default() };
        let tenant = Tenant::new("a", terms, None);
        let crowded = |asked| Err(Crowded { most: 3, asked });
        assert_eq!((tenant.begin(2), tenant.clone().begin(2)), (Ok(()), crowded(2)));
        assert_eq!((tenant.could_begin(), tenant.begin(1)), (Ok(()), Ok(())));
        assert_eq!(tenant.could_begin(), crowded(1));
        tenant.end(2);
        assert_eq!((tenant.begin(2), tenant.begin(1)), (Ok(()), crowded(1)));
        assert_eq!(Tenant::default().begin(u32::MAX - 1), Ok(()));
    }
}
