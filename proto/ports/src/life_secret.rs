//! How a node proves that a life of it is over, so that its next one may take the place at once: by the secret that it
//! drew for that life, and that it showed to nobody before. The registration that began the life had the secret's
//! digest alone: whoever reads a stream in the clear learns no secret that is still of use, and one router none for
//! another.
use sha2::{Digest, Sha256};

use crate::join_token::same;

/// Bytes of a secret, and of its digest.
pub const LIFE_SECRET_BYTES: usize = 32;
/// Lives whose secrets a registration shows at most: the router may not have seen the last of them.
pub const MAX_ENDED_LIVES: usize = 8;

/// What a registration tells of its life's secret.
pub fn life_digest(secret: &[u8]) -> [u8; LIFE_SECRET_BYTES] {
    Sha256::digest(secret).into()
}

/// Whether this is the secret that has the digest, in a time that does not depend on their bytes. No digest has none.
pub fn is_life_secret(secret: &[u8], digest: &[u8]) -> bool {
    secret.len() == LIFE_SECRET_BYTES && same(&life_digest(secret), digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_secret_has_a_digest_and_no_other_does() {
        let (secret, other) = ([7; LIFE_SECRET_BYTES], [8; LIFE_SECRET_BYTES]);
        let digest = life_digest(&secret);
        assert!(is_life_secret(&secret, &digest));
        assert!(!is_life_secret(&other, &digest) && !is_life_secret(&digest, &digest));
        assert!(!is_life_secret(&secret[..31], &digest) && !is_life_secret(&secret, &digest[..31]));
        assert!(!is_life_secret(&[], &life_digest(&[])) && !is_life_secret(&secret, &[]));
    }
}
