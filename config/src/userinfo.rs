//! What stands before the `@` of an address, which may be a password: nothing that people read shows it. Pure.
use std::borrow::Cow;

/// A flag's value without it.
pub(crate) fn hidden(value: &str) -> Cow<'_, str> {
    let parts = value.split_once("://").and_then(|(scheme, rest)| Some((scheme, rest.rsplit_once('@')?.1)));
    match parts {
        // A password may have a slash in it: the last @ counts, wherever it is.
        Some((scheme, host)) => format!("{scheme}://…@{host}").into(),
        None => value.into(),
    }
}

/// A text that has values among its words.
pub(crate) fn hidden_in(text: &str) -> String {
    text.split_inclusive(char::is_whitespace).map(hidden).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_a_password_is_not_shown() {
        for (value, shown) in [
            ("etcd://root:geheim@h:1/p", "etcd://…@h:1/p"),
            ("http://root:ge/h@im@h:1", "http://…@h:1"),
            ("http://h:1/p", "http://h:1/p"),
            ("user@h", "user@h"),
            ("", ""),
        ] {
            assert_eq!(hidden(value), shown);
        }
        let text = "invalid value 'http://a:b@h' for '--x'\n  [http://c:d@h, http://e@h]\n";
        assert_eq!(hidden_in(text), "invalid value 'http://…@h' for '--x'\n  [http://…@h, http://…@h]\n");
    }
}
