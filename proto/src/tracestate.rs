//! W3C `tracestate` (<https://www.w3.org/TR/trace-context-2/#tracestate-header>): what the tracing systems before us
//! say of a trace. We have no entry of our own: it is passed on as it came.
use std::sync::Arc;

/// Members of a list at most.
const MOST_MEMBERS: usize = 32;
/// Bytes that are passed on at most: as many as everybody must pass on.
const MOST_BYTES: usize = 512;

/// An opaque list, checked for its form; nearly always empty. Clones share it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceState(Option<Arc<str>>);

impl TraceState {
    /// What all headers of this name say together. Nothing at all where one of them is malformed, as W3C asks. Of a
    /// list that is too long the last members are left out.
    pub fn read<'a>(headers: impl IntoIterator<Item = &'a str>) -> Self {
        let members =
            headers.into_iter().flat_map(|header| header.split(',')).map(|member| member.trim_matches([' ', '\t']));
        let (mut list, mut keys) = (String::new(), Vec::new());
        let mut is_full = false;
        for member in members.filter(|member| !member.is_empty()) {
            let Some((key, _)) = member.split_once('=').filter(|(key, value)| is_key(key) && is_value(value)) else {
                return Self::default();
            };
            if keys.contains(&key) || keys.len() == MOST_MEMBERS {
                return Self::default();
            }
            keys.push(key);
            is_full |= list.len() + usize::from(!list.is_empty()) + member.len() > MOST_BYTES;
            if !is_full {
                if !list.is_empty() {
                    list.push(',');
                }
                list.push_str(member);
            }
        }
        Self((!list.is_empty()).then(|| list.into()))
    }

    /// The header's text; empty: no header.
    pub fn as_str(&self) -> &str {
        self.0.as_deref().unwrap_or_default()
    }
}

/// `name`, or `tenant@system`.
fn is_key(key: &str) -> bool {
    let is_part = |part: &str, most: usize| {
        let first = part.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        let rest = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-*/".contains(&byte);
        first && part.len() <= most && part.bytes().all(rest)
    };
    match key.split_once('@') {
        None => is_part(key, 256),
        Some((tenant, system)) => is_part(tenant, 241) && is_part(system, 14),
    }
}

/// Printable, without the list's own signs; spaces around it are the list's.
fn is_value(value: &str) -> bool {
    let is_printable = |byte: u8| (b' '..=b'~').contains(&byte) && !b",=".contains(&byte);
    (1..=256).contains(&value.len()) && value.bytes().all(is_printable) && !value.ends_with(' ')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn several_headers_are_one_list() {
        let state = TraceState::read(["rojo=00f067aa0ba902b7 ,\tcongo=t61rcWkgMzE", "", "5fd@x-1=a b/;:,"]);
        assert_eq!(state.as_str(), "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE,5fd@x-1=a b/;:");
        assert_eq!(TraceState::read([state.as_str()]), state);
        assert_eq!((TraceState::read([" , "]), TraceState::default().as_str()), (TraceState::default(), ""));
    }

    #[test]
    fn one_malformed_member_spoils_the_list() {
        let long = format!("a={}", "x".repeat(257));
        let many: Vec<_> = (0..33).map(|number| format!("k{number}=v")).collect();
        for text in [
            "a=1,b",
            "A=1",
            "a=1,a=2",
            "=1",
            "a=",
            "a=b=c",
            "a@=1",
            "@a=1",
            "ä=1",
            "a=ä",
            "a=\u{7f}",
            &long,
            &many.join(","),
        ] {
            assert_eq!(TraceState::read([text]), TraceState::default(), "{text}");
        }
        assert_ne!(TraceState::read([many[..32].join(",").as_str()]), TraceState::default());
    }

    #[test]
    fn the_last_members_of_a_long_list_are_left_out() {
        let member = |key: &str| format!("{key}={}", "x".repeat(250));
        let state = TraceState::read([format!("{},{},c=1", member("a"), member("b")).as_str(), "d=1234567"]);
        assert_eq!(state.as_str(), format!("{},{},c=1", member("a"), member("b")));
    }

    proptest! {
        #[test]
        fn never_panics_and_is_stable(text in "[a-c@=, \\PC]{0,80}") {
            let state = TraceState::read([text.as_str()]);
            prop_assert_eq!(TraceState::read([state.as_str()]), state);
        }
    }
}
