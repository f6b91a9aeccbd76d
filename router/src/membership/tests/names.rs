//! Names of KV blocks: which routers agree on them, and that others find nothing.
use tandem_ports::JoinToken;
use tandem_proto::CacheSalt;
use tandem_proto::hash::sequence_hashes;

use super::*;
use crate::admission::cache_salt::CacheSalts;
use crate::admission::tenant::{Tenant, Terms};

const TOKENS: [&str; 2] = ["0123456789abcdef", "0123456789abcdeg"];

fn router(token: Option<&str>) -> Membership {
    let tokens = token.map(|token| JoinTokens::from(JoinToken::of(token).unwrap()));
    membership().with_join_tokens(tokens.as_ref())
}

/// Of one prompt of a tenant, as this router has them, and as nodes get them by its requests' salt.
fn blocks(router: &Membership, tenant: &str, own: &str) -> Vec<SequenceHash> {
    let tenant = Tenant::new(tenant, Terms { shares_cache: false, ..Terms::default() }, None);
    let salt = CacheSalts::new(router.cache_secret()).of(&tenant, own);
    let salt = CacheSalt::from_wire(&salt.to_wire()).unwrap();
    sequence_hashes(router.sequence_key(salt), &[5; 64], 16)
}

fn hit(router: &Membership, names: &[SequenceHash]) -> Vec<u32> {
    router.table.with(|table| table.cached_of(names, Instant::now()))
}

#[test]
fn routers_of_one_token_agree_on_names() {
    for token in [None, Some(TOKENS[0])] {
        let [one, other] = [router(token), router(token)];
        assert_eq!(blocks(&one, "a", "x"), blocks(&other, "a", "x"));
    }
}

#[test]
fn a_demand_names_the_blocks_that_a_node_would_reuse() {
    let (router, all) = (membership(), Vec::from_iter(0..96));
    let names = |blocks: usize| {
        let block_tokens = router.totals().block_tokens as usize;
        sequence_hashes(router.sequence_key(CacheSalt::NONE), &all[..blocks * block_tokens], block_tokens)
    };
    let demand = |prompt: usize| router.demand_of(&all[..prompt], 4, CacheSalt::NONE);
    for (prompt, blocks) in [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (80, 4)] {
        assert_eq!(demand(prompt), Demand { hashes: names(blocks), ..router.demand(prompt as u32, 4) });
    }
    let wide = v1::Register { block_tokens: 32, ..register("p", v1::Role::Prefill, 1) };
    router.register(wide, Instant::now()).unwrap();
    assert_eq!(demand(64).hashes, names(1));
}

/// A node that was named its blocks by one router, in the index of another.
#[test]
fn who_has_another_key_claims_no_hit() {
    let routers = [None, Some(TOKENS[0]), Some(TOKENS[1])].map(router);
    let theirs = |router: &Membership| ["a", "b"].map(|tenant| ["", "x"].map(|own| blocks(router, tenant, own)));
    let names: Vec<_> = routers.iter().flat_map(theirs).flatten().collect();
    for told in &names {
        let (router, now) = (router(None), Instant::now());
        let node = router.register(register("p", v1::Role::Prefill, 1), now).unwrap();
        let changes = CacheChanges { snapshot: true, hashes: told.clone(), ..CacheChanges::default() };
        router.kv_events(node.session, &changes, now).unwrap();
        for asked in &names {
            assert_eq!(hit(&router, asked), [if told == asked { 4 } else { 0 }]);
        }
    }
    let distinct: std::collections::BTreeSet<_> = names.iter().flatten().collect();
    assert_eq!(distinct.len(), 3 * 2 * 2 * 4, "no name twice");
}

#[test]
fn names_of_another_length_are_none() {
    for (bytes, good) in [(0, true), (16, true), (32, true), (8, false), (17, false), (24, false)] {
        let events = v1::KvEvents { hashes: vec![1; bytes], ..v1::KvEvents::default() };
        let read = CacheChanges::try_from(events);
        assert_eq!(read.is_ok(), good, "{bytes} bytes");
        if let Err(error) = read {
            assert_eq!(error.message, format!("sequence hashes have 16 bytes each, not {bytes}"));
        }
    }
}
