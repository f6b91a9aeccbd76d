//! Build ids in words. An id names all that both ends of a hand-off must have in common; nodes compare it as a whole,
//! and pair with nobody else:
//!
//! ```text
//! ucx-1.13.1/shm/7        UCX's version, its profile ("+cuda": for KV on a GPU), Tandem's protocol
//! tcp/7/encrypted         Tandem's protocol, and whether KV is encrypted
//! mem/7
//! ```
//! Of two that differ, people want to know what differs, and what to do. Pure.
/// Ends the id of nodes that encrypt.
pub(crate) const ENCRYPTED: &str = "/encrypted";
/// Ends the profile of nodes whose KV is on a GPU.
pub(crate) const ON_GPU: &str = "+cuda";
/// Of what a stranger says.
const MOST_CHARS: usize = 64;

/// What an id says; another version's may say it in another form.
#[derive(Debug, Default, PartialEq, Eq)]
struct Parts<'a> {
    backend: Option<&'a str>,
    ucx: Option<&'a str>,
    profile: Option<&'a str>,
    on_gpu: bool,
    protocol: Option<u32>,
    encrypted: bool,
}

/// What differs between this node's build of a transport and that of another node, and what to do.
pub(crate) fn difference(ours: &str, theirs: &str) -> String {
    let (here, there) = (Parts::of(ours), Parts::of(theirs));
    if here.backend != there.backend {
        let (here, there) = (shown(here.backend), shown(there.backend));
        return format!("KV goes by {here} here, by {there} there; give all nodes one --transport");
    }
    if here.protocol != there.protocol {
        // The other parts may mean other things there.
        let there = there.protocol.map_or("an older one".to_owned(), |protocol| protocol.to_string());
        let here = here.protocol.unwrap_or_default();
        return format!("Tandem's protocol is {here} here, {there} there; run one version of Tandem on all nodes");
    }
    let words = [
        (here.ucx != there.ucx).then(|| {
            let (here, there) = (shown(here.ucx), shown(there.ucx));
            format!("UCX is {here} here, {there} there; run one version of UCX on all nodes (--ucx-lib-dir)")
        }),
        (here.profile != there.profile).then(|| {
            let (here, there) = (shown(here.profile), shown(there.profile));
            format!("UCX's profile is {here} here, {there} there; give all nodes one --ucx-profile")
        }),
        (here.on_gpu != there.on_gpu).then(|| {
            let place = |parts: &Parts| if parts.on_gpu { "on a GPU" } else { "in main memory" };
            format!("KV is {} here, {} there; give all nodes one kind of --device", place(&here), place(&there))
        }),
        (here.encrypted != there.encrypted).then(|| {
            let end = |parts: &Parts| if parts.encrypted { "encrypted" } else { "not encrypted" };
            format!("KV is {} here, {} there; give --kv-encrypt to all nodes or to none", end(&here), end(&there))
        }),
    ];
    let words: Vec<String> = words.into_iter().flatten().collect();
    if words.is_empty() {
        let (here, there) = (shown(Some(ours)), shown(Some(theirs)));
        return format!("the build is {here} here, {there} there; run one build of Tandem on all nodes");
    }
    words.join(". ")
}

impl<'a> Parts<'a> {
    fn of(id: &'a str) -> Self {
        let (library, rest) = id.split_once('/').unwrap_or((id, ""));
        let (backend, version) = library.split_once('-').unzip();
        let mut parts = Self { backend: backend.or(Some(library)), ucx: version, ..Self::default() };
        for part in rest.split('/') {
            if part == ENCRYPTED.trim_start_matches('/') {
                parts.encrypted = true;
            } else if let Ok(number) = part.parse() {
                parts.protocol = Some(number);
            } else if parts.profile.is_none() {
                parts.on_gpu = part.ends_with(ON_GPU);
                parts.profile = Some(part.strip_suffix(ON_GPU).unwrap_or(part));
            }
        }
        parts
    }
}

fn shown(word: Option<&str>) -> String {
    match word {
        None | Some("") => "unknown".to_owned(),
        Some(word) => word.chars().take(MOST_CHARS).collect::<String>().escape_default().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_difference_has_its_words() {
        let ucx = "ucx-1.13.1/shm/7";
        let cases = [
            (ucx, "ucx-1.22.0/shm/7", "UCX is 1.13.1 here, 1.22.0 there; run one version of UCX on all nodes"),
            (ucx, "ucx-1.13.1/tcp/7", "profile is shm here, tcp there; give all nodes one --ucx-profile"),
            (ucx, "ucx-1.13.1/shm+cuda/7", "KV is in main memory here, on a GPU there; give all nodes one kind of"),
            (ucx, "ucx-1.13.1/shm/6", "protocol is 7 here, 6 there; run one version of Tandem on all nodes"),
            // Before the protocol was part of it: the hellos of these builds have another form.
            (ucx, "ucx-1.13.1/shm/tka1", "protocol is 7 here, an older one there; run one version of Tandem"),
            ("tcp/7", "tcp/7/encrypted", "not encrypted here, encrypted there; give --kv-encrypt to all nodes"),
            ("tcp/7", ucx, "KV goes by tcp here, by ucx there; give all nodes one --transport"),
            ("mem/7", "", "KV goes by mem here, by unknown there"),
            (ucx, "ucx-1.13.1/shm/7/x", "the build is ucx-1.13.1/shm/7 here, ucx-1.13.1/shm/7/x there; run one"),
        ];
        for (ours, theirs, words) in cases {
            let said = difference(ours, theirs);
            assert!(said.contains(words), "{ours} and {theirs}: {said}");
        }
        let both = difference(ucx, "ucx-1.22.0/tcp/7");
        assert!(both.contains("(--ucx-lib-dir). UCX's profile is shm here"), "{both}");
    }

    proptest! {
        #[test]
        fn a_strangers_words_are_short_and_printable(rest in "(.|\n){0,300}", more in "(.|\n){0,300}") {
            let id = ["ucx-", "", "tcp/"].map(|head| format!("{head}{rest}/{more}"));
            let said = id.map(|id| difference("ucx-1.13.1/shm/7", &id)).concat();
            prop_assert!(said.len() < 4096 && said.chars().all(|char| !char.is_control()), "{said}");
        }
    }
}
