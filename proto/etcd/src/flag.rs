//! An address as the value of a flag. clap's own message repeats a value that is wrong, and this one may hold a
//! password: ours does not.
use std::ffi::OsStr;

use clap::builder::{TypedValueParser, ValueParserFactory};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, Error};

use crate::address::EtcdAddress;

/// Reads an [`EtcdAddress`].
#[derive(Clone, Copy, Debug)]
pub struct AddressParser;

impl ValueParserFactory for EtcdAddress {
    type Parser = AddressParser;

    fn value_parser() -> AddressParser {
        AddressParser
    }
}

impl TypedValueParser for AddressParser {
    type Value = EtcdAddress;

    fn parse_ref(&self, command: &Command, flag: Option<&Arg>, value: &OsStr) -> Result<EtcdAddress, Error> {
        // What is not UTF-8 is no address either.
        value.to_string_lossy().parse().map_err(|wrong| {
            let flag = format!("--{}", flag.and_then(Arg::get_long).unwrap_or_default());
            let message = format!("{flag}: {wrong}\n");
            let mut error = Error::raw(ErrorKind::ValueValidation, message).with_cmd(command);
            error.insert(ContextKind::InvalidArg, ContextValue::String(flag));
            error
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[arg(long)]
        register: Option<EtcdAddress>,
    }

    #[test]
    fn what_is_wrong_is_not_repeated() {
        let read = |value: &str| Flags::try_parse_from(["p", "--register", value]);
        assert_eq!(read("etcd://h/p").unwrap().register, "etcd://h/p".parse().ok());
        for wrong in ["etcd://root:geheim@h:1/p", "etcd://root:geheim", "http://root:geheim@h/p", "root:geheim@h"] {
            let error = read(wrong).unwrap_err();
            let text = error.to_string();
            assert!(text.starts_with("error: --register: ") && !text.contains("geheim"), "{text}");
            assert_eq!((error.kind(), error.exit_code()), (ErrorKind::ValueValidation, 2));
        }
    }
}
