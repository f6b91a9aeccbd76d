//! Headers that a collector wants with every call, in the form that OpenTelemetry gives its variables:
//! `key=value,key=value`, values percent-encoded. They are secrets as a rule, so nothing prints them.
use std::fmt;
use std::str::FromStr;

use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue, MetadataMap};
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// See the head of this file.
#[derive(Clone, Default, PartialEq)]
pub struct Headers(Vec<(AsciiMetadataKey, AsciiMetadataValue)>);

impl Headers {
    /// As gRPC has them.
    pub fn metadata(&self) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        self.add_to(&mut metadata);
        metadata
    }

    fn add_to(&self, metadata: &mut MetadataMap) {
        for (key, value) in &self.0 {
            metadata.insert(key, value.clone());
        }
    }
}

impl Interceptor for Headers {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        self.add_to(request.metadata_mut());
        Ok(request)
    }
}

impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(key, _)| key.as_str())).finish()
    }
}

impl FromStr for Headers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
        pairs.map(pair).collect::<Result<_, _>>().map(Self)
    }
}

/// An error names no value.
fn pair(pair: &str) -> Result<(AsciiMetadataKey, AsciiMetadataValue), String> {
    let (key, value) = pair.split_once('=').ok_or("not key=value,key=value")?;
    let key = key.trim().to_ascii_lowercase();
    let wrong = |what: &str| format!("{key:?} is no {what} of a header");
    // Binary ones (-bin) are none.
    let name = AsciiMetadataKey::from_bytes(key.as_bytes()).map_err(|_| wrong("name"))?;
    let value = decoded(value.trim()).and_then(|value| AsciiMetadataValue::try_from(value).ok());
    let mut value = value.ok_or_else(|| format!("what {key:?} is set to is no value of a header"))?;
    value.set_sensitive(true);
    Ok((name, value))
}

/// Without percent-encoding.
fn decoded(text: &str) -> Option<Vec<u8>> {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((&byte, behind)) = rest.split_first() {
        let (byte, behind) = match byte {
            b'%' => {
                let (digits, behind) = behind.split_at_checked(2)?;
                let digits = str::from_utf8(digits).ok().filter(|digits| !digits.starts_with('+'))?;
                (u8::from_str_radix(digits, 16).ok()?, behind)
            }
            byte => (byte, behind),
        };
        bytes.push(byte);
        rest = behind;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_with_percents_are_read() {
        let headers: Headers = " Authorization=Basic%20YWJj=, x-tenant = a%2Cb ,".parse().unwrap();
        let metadata = headers.metadata();
        let of = |key: &str| metadata.get(key).unwrap().to_str().unwrap().to_owned();
        assert_eq!((of("authorization"), of("x-tenant"), metadata.len()), ("Basic YWJj=".into(), "a,b".into(), 2));
        assert_eq!("".parse(), Ok(Headers::default()));
    }

    #[test]
    fn nonsense_is_refused_without_its_value() {
        let values = ["x=secret%2", "x=secret%zz", "x=secret%+1", "x=secret%0A"];
        for wrong in ["secret", "=secret", "a b=secret", "x-bin=secret"].into_iter().chain(values) {
            let error = wrong.parse::<Headers>().unwrap_err();
            assert!(!error.contains("secret"), "{wrong}: {error}");
        }
        assert_eq!(format!("{:?}", "key=secret".parse::<Headers>().unwrap()), "[\"key\"]");
    }
}
