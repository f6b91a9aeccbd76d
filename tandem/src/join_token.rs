//! The secret by which nodes may join the router: a file that only this user can read. `tandem up` makes one for as
//! long as its cluster lasts, or uses the user's. What is in it is for the programs that get its path.
use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rand::TryRngCore;
use rand::rngs::OsRng;

/// Random bytes of a token; in the file they are hexadecimal digits.
const BYTES: usize = 32;

/// The file of the token.
pub enum JoinToken {
    /// The user's.
    Given(PathBuf),
    /// This cluster's; removed on drop.
    Made(PathBuf),
}

impl JoinToken {
    /// The user's file where one is given, or a new one beside the state file. To be called by the owner of the state
    /// file.
    ///
    /// # Errors
    /// The given one is not there, or the new one cannot be written.
    pub fn of_cluster(state: &Path, given: Option<&Path>) -> anyhow::Result<Self> {
        if let Some(given) = given {
            let path = fs::canonicalize(given);
            return Ok(Self::Given(path.with_context(|| format!("--join-token-file: no {}", given.display()))?));
        }
        let mut path = std::path::absolute(state)?.into_os_string();
        path.push(".token");
        let token = Self::Made(path.into());
        write(token.path()).with_context(|| format!("cannot write {}", token.path().display()))?;
        Ok(token)
    }

    /// Absolute.
    pub fn path(&self) -> &Path {
        match self {
            Self::Given(path) | Self::Made(path) => path,
        }
    }
}

impl Drop for JoinToken {
    fn drop(&mut self) {
        if let Self::Made(path) = self {
            let _ = fs::remove_file(path);
        }
    }
}

fn write(path: &Path) -> anyhow::Result<()> {
    let mut token = [0; BYTES];
    OsRng.try_fill_bytes(&mut token)?;
    let digits: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
    // Of a cluster that was killed. Always a file of our own making: the mode of another one would not be ours to
    // choose.
    let _ = fs::remove_file(path);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    Ok(writeln!(file, "{digits}")?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_cluster_makes_its_own_secret_and_removes_it() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("cluster.json");
        let text = |token: &JoinToken| fs::read_to_string(token.path()).unwrap().trim().to_owned();
        let token = JoinToken::of_cluster(&state, None).unwrap();
        let first = text(&token);
        assert!(first.len() == 64 && first.bytes().all(|digit| digit.is_ascii_hexdigit()), "{first}");
        assert_eq!(fs::metadata(token.path()).unwrap().permissions().mode() & 0o777, 0o600);
        drop(token);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        // What a killed cluster left, with rights that others gave it.
        let left = dir.path().join("cluster.json.token");
        fs::write(&left, "left").unwrap();
        fs::set_permissions(&left, fs::Permissions::from_mode(0o644)).unwrap();
        let token = JoinToken::of_cluster(&state, None).unwrap();
        assert_ne!(text(&token), first);
        assert_eq!(fs::metadata(token.path()).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn the_users_token_stays() {
        let dir = tempfile::tempdir().unwrap();
        let given = dir.path().join("token");
        let state = dir.path().join("cluster.json");
        assert!(JoinToken::of_cluster(&state, Some(&given)).err().unwrap().to_string().contains("--join-token-file"));
        fs::write(&given, "secret\n").unwrap();
        let token = JoinToken::of_cluster(&state, Some(&given)).unwrap();
        assert!(token.path().is_absolute());
        drop(token);
        assert_eq!(fs::read_to_string(&given).unwrap(), "secret\n");
    }
}
