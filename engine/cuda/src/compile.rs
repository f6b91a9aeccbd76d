//! Kernels from their sources to a loaded image: compiled by NVRTC for the card at hand, at first start. What was
//! compiled is kept in a directory, under a name that all inputs of the compiler determine; a file there that is
//! damaged, or that the driver does not take, is compiled again. Nothing depends on the directory: where it cannot be
//! written, each start compiles. An image of a container brings files of the same names in a directory of its own,
//! compiled when it was built ([`ahead`]).
use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use cudarc::nvrtc::sys::nvrtcProgram;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::context::Context;
use crate::driver::{self, Failure, Status};
use crate::error::CudaError;
use crate::kernels::{HEADERS, SOURCES, Source};
use crate::module::Module;
use crate::nvrtc::{compiler_failed, nvrtc_version};

/// Begins each kept file; another number where their form changes.
const MAGIC: &[u8; 8] = b"tndmcub1";
/// Of [`MAGIC`], and of the image's hash behind it.
const HEAD_BYTES: usize = 16;
/// What is asked of the compiler beside the architecture, as `make cuda-check` does.
const OPTIONS: [&str; 1] = ["-std=c++17"];

/// Where compiled kernels are looked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Folders {
    /// What is compiled here is kept here.
    pub cache: Option<PathBuf>,
    /// What [`ahead`] has written, never changed.
    pub ahead: Option<PathBuf>,
}

impl Folders {
    /// Those of this process's environment: `$XDG_CACHE_HOME/tandem/kernels` or `~/.cache/tandem/kernels`, no cache
    /// where there is no home; and `$TANDEM_KERNELS`.
    pub fn of_environment() -> Self {
        let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
        Self { cache: cache.map(|cache| cache.join("tandem/kernels")), ahead: folder("TANDEM_KERNELS") }
    }

    /// No cache but this one.
    pub fn cache(cache: Option<&Path>) -> Self {
        Self { cache: cache.map(Path::to_owned), ahead: None }
    }
}

/// The module of `source` for the context's device; from a folder if it is there, and kept in the cache if it was not.
///
/// # Errors
/// [`CudaError::Kernels`] when there is no NVRTC, it does not compile the source, or the driver refuses the image.
pub fn module(context: &Arc<Context>, source: &Source, folders: &Folders) -> Result<Arc<Module>, CudaError> {
    let (arch, nvrtc) = (context.device().arch(), nvrtc_version()?);
    let kept = |folder: &Option<PathBuf>| Kept::of(source, &arch, &nvrtc, folder.as_deref());
    for image in [&folders.ahead, &folders.cache].into_iter().filter_map(|folder| kept(folder).read()) {
        match Module::load(context, &image) {
            Err(error) if error.is_lost() => return Err(error),
            Err(error) => tracing::warn!(kernels = source.name, %error, "a kept image is of no use: compiling again"),
            loaded => return loaded,
        }
    }
    let (image, kept) = (compile(source, &arch)?, kept(&folders.cache));
    if let Err(error) = kept.write(&image) {
        tracing::warn!(%error, path = ?kept.0, "compiled kernels cannot be kept: the next start compiles them again");
    }
    Module::load(context, &image)
}

/// Compiles all kernels for cards of this architecture (`sm_80`), which need not be here, into `folder`. Returns the
/// files.
///
/// # Errors
/// [`CudaError::Kernels`] when there is no NVRTC, it does not compile for that architecture, or a file cannot be
/// written.
pub fn ahead(arch: &str, folder: &Path) -> Result<Vec<PathBuf>, CudaError> {
    let number =
        arch.strip_prefix("sm_").map(|number| number.trim_end_matches(|letter: char| letter.is_ascii_lowercase()));
    if !number.is_some_and(|number| !number.is_empty() && number.chars().all(|digit| digit.is_ascii_digit())) {
        return Err(CudaError::Kernels(format!("{arch:?} is no architecture such as sm_80 or sm_90a")));
    }
    let nvrtc = nvrtc_version()?;
    let write = |source: &Source| {
        let kept = Kept::of(source, arch, &nvrtc, Some(folder));
        let image = compile(source, arch)?;
        kept.write(&image).map_err(|error| CudaError::Kernels(format!("{}: {error}", folder.display())))?;
        Ok(kept.0)
    };
    SOURCES.iter().filter_map(|source| write(source).transpose()).collect()
}

/// The file that an image is kept in.
struct Kept(Option<PathBuf>);

impl Kept {
    fn of(source: &Source, arch: &str, nvrtc: &str, cache: Option<&Path>) -> Self {
        let mut hasher = Xxh3::new();
        let headers = HEADERS.into_iter().flat_map(|(name, text)| [name, text]);
        for text in [nvrtc, arch].into_iter().chain(headers).chain([source.name, source.text]).chain(OPTIONS) {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        let name = format!("{}-{arch}-{:032x}.cubin", source.name.trim_end_matches(".cu"), hasher.digest128());
        Self(cache.map(|folder| folder.join(name)))
    }

    /// The image, if a whole one is there.
    fn read(&self) -> Option<Vec<u8>> {
        let bytes = fs::read(self.0.as_ref()?).ok()?;
        let (head, image) = bytes.split_at_checked(HEAD_BYTES)?;
        let whole = head[..8] == *MAGIC && head[8..] == xxh3_64(image).to_le_bytes();
        if !whole {
            tracing::warn!(path = ?self.0, "a kept image of kernels is damaged: compiling again");
        }
        whole.then(|| image.to_vec())
    }

    /// Keeps `image`: whoever reads meanwhile sees the file before or the whole new one.
    fn write(&self, image: &[u8]) -> io::Result<()> {
        let Some(path) = &self.0 else { return Ok(()) };
        let bytes = [MAGIC, &xxh3_64(image).to_le_bytes()[..], image].concat();
        let unfinished = path.with_extension(format!("{}.part", std::process::id()));
        let folder = path.parent().unwrap_or(Path::new("."));
        let outcome = fs::create_dir_all(folder)
            .and_then(|()| fs::write(&unfinished, bytes))
            .and_then(|()| fs::rename(&unfinished, path));
        outcome.inspect_err(|_| drop(fs::remove_file(&unfinished)))
    }
}

/// Compiles a source to a cubin.
fn compile(source: &Source, arch: &str) -> Result<Vec<u8>, CudaError> {
    let began = std::time::Instant::now();
    let text = |text: &str| {
        CString::new(text).map_err(|_| CudaError::Kernels(format!("{} has a zero in its text", source.name)))
    };
    let (name, code) = (text(source.name)?, text(source.text)?);
    let headers = HEADERS.into_iter().map(|(name, code)| Ok((text(name)?, text(code)?)));
    let program = Program::new(&code, &name, &headers.collect::<Result<Vec<_>, CudaError>>()?)?;
    let options: Vec<CString> =
        OPTIONS.into_iter().map(text).chain([text(&format!("--gpu-architecture={arch}"))]).collect::<Result<_, _>>()?;
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: the program is there, and the options are strings that outlive the call.
    let compiled = unsafe { driver::nvrtcCompileProgram(program.0, options.len() as i32, options.as_ptr()) };
    compiled.map_err(|failure| {
        CudaError::Kernels(match failure.is(Status::NVRTC_BUILTIN_OPERATION_FAILURE) {
            true => {
                "NVRTC does not find its libnvrtc-builtins: put the folder that has both into LD_LIBRARY_PATH".into()
            }
            false => {
                let (name, log) = (source.name, program.log());
                format!("NVRTC does not compile {name} for {arch}: {}\n{log}", compiler_failed(failure))
            }
        })
    })?;
    let image = program.image()?;
    let took_ms = began.elapsed().as_millis() as u64;
    tracing::info!(kernels = source.name, arch, took_ms, image_bytes = image.len(), "kernels compiled");
    Ok(image)
}

/// A program of the compiler.
struct Program(nvrtcProgram);

impl Program {
    /// `headers`: name and text of each.
    fn new(code: &CStr, name: &CStr, headers: &[(CString, CString)]) -> Result<Self, CudaError> {
        let mut program = std::ptr::null_mut();
        let (names, texts): (Vec<_>, Vec<_>) =
            headers.iter().map(|(name, text)| (name.as_ptr(), text.as_ptr())).unzip();
        // SAFETY: strings, and arrays of as many strings as there are headers, which the call copies; it writes the
        // handle.
        let created = unsafe {
            let (code, name, count) = (code.as_ptr(), name.as_ptr(), headers.len() as i32);
            driver::nvrtcCreateProgram(&mut program, code, name, count, texts.as_ptr(), names.as_ptr())
        };
        created.map(|()| Self(program)).map_err(compiler_failed)
    }

    fn image(&self) -> Result<Vec<u8>, CudaError> {
        let mut bytes = 0;
        // SAFETY: the program is there; writes one number.
        unsafe { driver::nvrtcGetCUBINSize(self.0, &mut bytes) }.map_err(compiler_failed)?;
        let mut image = vec![0u8; bytes];
        // SAFETY: writes as many bytes as the call before said.
        unsafe { driver::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast()) }.map_err(compiler_failed)?;
        Ok(image)
    }

    /// What the compiler says of the source.
    fn log(&self) -> String {
        let read = || -> Result<Vec<u8>, Failure> {
            let mut bytes = 0;
            // SAFETY: the program is there; writes one number.
            unsafe { driver::nvrtcGetProgramLogSize(self.0, &mut bytes) }?;
            let mut log = vec![0u8; bytes];
            // SAFETY: writes as many bytes as the call before said.
            unsafe { driver::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) }?;
            Ok(log)
        };
        String::from_utf8_lossy(&read().unwrap_or_default()).trim_end_matches(['\0', '\n']).to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `new` and destroyed once.
        let _ = unsafe { driver::nvrtcDestroyProgram(&mut self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: Source = Source { name: "rows.cu", text: "text", kernels: &[] };

    #[test]
    fn an_image_is_kept_under_a_name_that_all_inputs_determine() {
        let folder = tempfile::tempdir().expect("a folder");
        let kept = Kept::of(&SOURCE, "sm_80", "13.0", Some(&folder.path().join("deeper")));
        assert_eq!(kept.read(), None);
        kept.write(b"image").expect("written");
        assert_eq!(kept.read().as_deref(), Some(&b"image"[..]));
        let others = [
            Kept::of(&SOURCE, "sm_86", "13.0", Some(folder.path())),
            Kept::of(&SOURCE, "sm_80", "13.1", Some(folder.path())),
            Kept::of(&Source { text: "texts", ..SOURCE }, "sm_80", "13.0", Some(folder.path())),
        ];
        let name = |kept: &Kept| kept.0.as_ref().and_then(|path| path.file_name().map(|name| name.to_owned()));
        assert!(others.iter().all(|other| name(other).is_some() && name(other) != name(&kept)));
    }

    #[test]
    fn damaged_files_are_no_images() {
        let folder = tempfile::tempdir().expect("a folder");
        let kept = Kept::of(&SOURCE, "sm_80", "13.0", Some(folder.path()));
        kept.write(b"an image of some length").expect("written");
        let path = kept.0.clone().expect("a path");
        let whole = fs::read(&path).expect("written");
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).expect("written");
            assert_eq!(kept.read(), None, "{length} bytes");
        }
        let mut changed = whole.clone();
        changed[HEAD_BYTES + 3] ^= 1;
        fs::write(&path, &changed).expect("written");
        assert_eq!(kept.read(), None);
        kept.write(b"new").expect("written");
        assert_eq!(kept.read().as_deref(), Some(&b"new"[..]));
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "no unfinished files");
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_an_error() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let kept = Kept::of(&SOURCE, "sm_80", "13.0", Some(&file.path().join("below")));
        assert!(kept.write(b"image").is_err());
        assert_eq!(kept.read(), None);
        assert!(Kept::of(&SOURCE, "sm_80", "13.0", None).write(b"image").is_ok(), "nowhere is nothing to write");
    }

    #[test]
    fn what_is_no_architecture_is_named() {
        for wrong in ["", "sm_", "90", "sm_9-0", "sm_90/../../x", "compute_90"] {
            let why = ahead(wrong, Path::new("/nonexistent")).expect_err("refused").to_string();
            assert!(why.contains("no architecture"), "{wrong}: {why}");
        }
    }
}
