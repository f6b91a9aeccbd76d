//! Which requests may reuse each other's KV: those with one salt. It goes into the names of cached blocks, on the nodes
//! and in the router's index, so that no tenant can learn from the time to its first token, or from its count of cached
//! tokens, what another tenant has asked. Pure.
use std::fmt;

use sha2::{Digest, Sha256};
use tandem_proto::{CacheSalt, Error};

use super::tenant::Tenant;

/// Bytes of a client's own salt at most.
pub const MAX_CACHE_SALT_BYTES: usize = 256;

/// Derives the salts, which key the names of all cached blocks ([`tandem_proto::SequenceKey`]). Routers with one secret
/// derive the same ones. A client that does not know it cannot look for prompts whose names collide with another
/// tenant's.
#[derive(Clone, Default)]
pub struct CacheSalts(Option<[u8; 32]>);

impl CacheSalts {
    /// With the cluster's secret, if it has one.
    pub fn new(secret: Option<[u8; 32]>) -> Self {
        Self(secret)
    }

    /// Of a request of `tenant` that brings a salt of its `own`, or none (empty). None, which is a key that everybody
    /// knows, where nothing tells it from others.
    pub fn of(&self, tenant: &Tenant, own: &str) -> CacheSalt {
        let owner = (!tenant.terms().shares_cache).then_some(&**tenant.name());
        let own = Some(own).filter(|own| !own.is_empty());
        if self.0.is_none() && owner.is_none() && own.is_none() {
            return CacheSalt::NONE;
        }
        // Parts of one length: no two triples meet.
        let part = |text: Option<&str>| text.map_or([0; 32], |text| Sha256::digest(text).into());
        let parts: [[u8; 32]; 3] = [self.0.unwrap_or_default(), part(owner), part(own)];
        let digest: [u8; 32] = Sha256::digest(parts.as_flattened()).into();
        digest.first_chunk().map_or(CacheSalt::NONE, |bits| CacheSalt::new(*bits))
    }
}

impl fmt::Debug for CacheSalts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "CacheSalts(secret)" } else { "CacheSalts" })
    }
}

/// Whether a client may send this salt.
///
/// # Errors
/// `InvalidArgument` (param `cache_salt`): it is too long.
pub fn check(own: &str) -> Result<(), Error> {
    if own.len() > MAX_CACHE_SALT_BYTES {
        let message = format!("cache_salt has {MAX_CACHE_SALT_BYTES} bytes at most, not {}", own.len());
        return Err(Error::invalid("cache_salt", message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::admission::tenant::Terms;

    fn tenant(name: &str, shares_cache: bool) -> Tenant {
        Tenant::new(name, Terms { shares_cache, ..Terms::default() }, None)
    }

    #[test]
    fn what_differs_in_secret_tenant_or_own_salt_shares_nothing() {
        let mut salts = BTreeSet::new();
        for secret in [None, Some([1; 32]), Some([2; 32])] {
            let of = CacheSalts::new(secret);
            for own in ["", "a", "b", "ab"] {
                for tenant in [tenant("a", false), tenant("b", false), tenant("ab", false), tenant("a", true)] {
                    let salt = of.of(&tenant, own);
                    assert!(salts.insert(salt), "{secret:?} {tenant:?} {own:?}: a salt that was there");
                    assert_eq!(salt, CacheSalts::new(secret).of(&tenant, own), "another router derives the same");
                }
                assert_eq!(of.of(&tenant("a", true), own), of.of(&tenant("b", true), own), "tenants that share");
            }
        }
        assert_eq!(salts.first(), Some(&CacheSalt::NONE), "no secret, no tenant, no salt: no salt");
    }

    #[test]
    fn own_salts_are_short() {
        assert!(check("").is_ok() && check(&"x".repeat(MAX_CACHE_SALT_BYTES)).is_ok());
        assert_eq!(check(&"x".repeat(MAX_CACHE_SALT_BYTES + 1)).unwrap_err().param, Some("cache_salt"));
    }

    #[test]
    fn the_secret_is_not_printed() {
        assert!(!format!("{:?}", CacheSalts::new(Some([0xcd; 32]))).contains("205"));
    }
}
