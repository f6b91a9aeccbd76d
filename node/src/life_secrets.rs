//! What this node shows a router to take the place of its own last life there, and nobody else can show: the secrets of
//! its ended lives. Each is drawn for one life, told by its digest when that begins, and shown when the next one does.
//! One owner for each link: another router sees other secrets. Pure; the caller draws.
use std::collections::VecDeque;

use tandem_ports::{LIFE_SECRET_BYTES, MAX_ENDED_LIVES, life_digest};
use tandem_proto::v1;

/// Of the lives on one link, the last one at the back.
#[derive(Default)]
pub struct LifeSecrets(VecDeque<[u8; LIFE_SECRET_BYTES]>);

impl LifeSecrets {
    /// The registration of the next life, which has this secret. Those before must be over.
    pub fn begin(&mut self, secret: [u8; LIFE_SECRET_BYTES], register: v1::Register) -> v1::Register {
        let ended = self.0.iter().map(|secret| v1::LifeSecret { secret: secret.to_vec() }).collect();
        if self.0.len() >= MAX_ENDED_LIVES {
            self.0.pop_front();
        }
        self.0.push_back(secret);
        v1::Register { secret_digest: life_digest(&secret).to_vec(), ended, ..register }
    }
}

#[cfg(test)]
mod tests {
    use tandem_ports::is_life_secret;

    use super::*;

    #[test]
    fn a_secret_is_shown_once_its_life_is_over() {
        let mut secrets = LifeSecrets::default();
        let mut begin = |byte| secrets.begin([byte; LIFE_SECRET_BYTES], v1::Register::default());
        let first = begin(1);
        assert!(first.ended.is_empty());
        let second = begin(2);
        let proves = |next: &v1::Register, last: &v1::Register| {
            next.ended.iter().any(|life| is_life_secret(&life.secret, &last.secret_digest))
        };
        assert!(proves(&second, &first) && !proves(&second, &second));
        let last = (3..=20).map(begin).last().unwrap();
        assert_eq!(last.ended.len(), MAX_ENDED_LIVES);
        assert!(!proves(&last, &second), "it is long over");
    }
}
