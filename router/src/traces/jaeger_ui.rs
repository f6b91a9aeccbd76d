//! Where Jaeger's pages are, so that what people read links to them. Nobody asks whether they are there.
use std::fmt;
use std::str::FromStr;

use http::Uri;

/// `http://host:16686`, with a base path where Jaeger has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JaegerUi(String);

impl JaegerUi {
    /// The page of the trace with these 32 hexadecimal digits.
    pub fn trace(&self, id: &str) -> String {
        format!("{}/trace/{id}", self.0)
    }
}

impl FromStr for JaegerUi {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no address of web pages: http://host[:port][/path]");
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        // What is written into a page as a link must be one.
        let is_web = matches!(uri.scheme_str(), Some("http" | "https"));
        let is_plain = uri.query().is_none() && uri.authority().is_some_and(|of| !of.as_str().contains('@'));
        if is_web && is_plain { Ok(Self(text.trim_end_matches('/').to_owned())) } else { Err(wrong()) }
    }
}

impl fmt::Display for JaegerUi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_web_pages_are_linked_to() {
        let jaeger: JaegerUi = "https://jaeger.example/ui/".parse().unwrap();
        assert_eq!(jaeger.trace("ab"), "https://jaeger.example/ui/trace/ab");
        for wrong in ["jaeger:16686", "javascript:alert(1)", "http://", "http://a/?b", "http://u:p@a/", "ftp://a"] {
            assert!(wrong.parse::<JaegerUi>().is_err(), "{wrong}");
        }
    }
}
