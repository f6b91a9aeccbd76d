//! The owners over the driver: what they do, what they say when they cannot, and that nothing is left of them. Counts
//! and planned faults are the process's: the tests take turns.
mod support;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use support::device;
use tandem_cuda::compile::Folders;
use tandem_cuda::kernels::launch::Mem;
use tandem_cuda::kernels::rows::{Embed, embed};
use tandem_cuda::kernels::{SOURCES, Source};
use tandem_cuda::{
    Buffer, Context, CudaError, CudaMemory, Device, Event, Graph, Kernels, Module, Pinned, Stream, compile,
};
use tandem_cuda_emu::{Count, Fault, Setting, count, fail_nth, seen, set};
use tandem_memory::{KvMemory, Run};
use xxhash_rust::xxh3::xxh3_64;

/// `None` where there is no device.
fn turn() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    device().then_some(turn)
}

fn context() -> Arc<Context> {
    Context::of(&Device::numbered(0).expect("a device")).expect("a context")
}

/// What is alive; `None` on a card, which does not count.
fn alive() -> Option<[u64; 6]> {
    let kinds = [Count::UsedBytes, Count::Allocations, Count::Streams, Count::Events, Count::Graphs, Count::Modules];
    let counts = kinds.map(|kind| count(kind).unwrap_or(u64::MAX));
    (counts[0] != u64::MAX).then_some(counts)
}

/// Lets the next fault of this kind happen; false on a card.
fn fail(fault: Fault) -> bool {
    alive().is_some() && fail_nth(fault, 1)
}

fn rows_source() -> &'static Source {
    SOURCES.iter().find(|source| source.name == "rows.cu").expect("a source")
}

#[test]
fn devices_are_listed_and_a_wrong_number_is_a_sentence() {
    let Some(_turn) = turn() else { return };
    let all = Device::all().expect("a driver");
    assert!(!all.is_empty());
    let device = &all[0];
    assert!(device.capability >= (8, 0) && device.memory_bytes > 0 && device.multiprocessors > 0, "{device:?}");
    assert!(device.pci_id.matches(':').count() == 2 && device.to_string().starts_with("GPU 0: "), "{device}");
    let why = Device::numbered(99).expect_err("not so many").to_string();
    assert!(why.contains("no GPU 99"), "{why}");
    assert!(tandem_cuda::device::driver().expect("a driver").to_string().contains('.'));
    assert!(tandem_cuda::nvrtc_version().expect("a compiler").contains('.'));
}

#[test]
fn memory_is_counted_and_too_much_is_an_error_with_numbers() {
    let Some(_turn) = turn() else { return };
    let (context, before) = (context(), alive());
    let (free, total) = context.memory().expect("tells");
    assert!(free <= total && total == context.device().memory_bytes);
    let buffer = Buffer::zeroed(&context, "a test", 3 << 20).expect("room");
    let mut bytes = vec![7u8; 3 << 20];
    buffer.read(0, &mut bytes).expect("reads");
    assert!(bytes.iter().all(|byte| *byte == 0));
    let refused = Buffer::new(&context, "a test", 1 << 50);
    let Err(CudaError::OutOfMemory { what: "a test", wanted, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(wanted, 1 << 50);
    drop(buffer);
    assert_eq!(alive(), before);
}

#[test]
fn copies_go_there_and_back_in_their_streams_order() {
    let Some(_turn) = turn() else { return };
    let (context, before) = (context(), alive());
    let (first, second) = (Stream::new(&context).expect("made"), Stream::new(&context).expect("made"));
    let (mut there, back) = (Pinned::new(&context, 4096).expect("made"), Pinned::new(&context, 4096).expect("made"));
    let (buffer, event) = (Buffer::new(&context, "a test", 8192).expect("room"), Event::new(&context).expect("made"));
    // SAFETY: nothing is copied yet.
    unsafe { there.slice_mut::<u32>(0, 1024) }.iter_mut().zip(0..).for_each(|(to, value)| *to = value);
    buffer.upload(4096, &there, 0, 4096, &first).expect("queued");
    event.record(&first).expect("queued");
    second.wait(&event).expect("queued");
    buffer.download(4096 + 400, &back, 8, 400, &second).expect("queued");
    second.synchronize().expect("done");
    // SAFETY: the streams have done their work.
    let values: Vec<u32> = unsafe { back.slice(8, 100) }.to_vec();
    assert!(values.into_iter().eq(100..200));
    event.synchronize().expect("done");
    drop((first, second, there, back, buffer, event));
    assert_eq!(alive(), before);
}

/// What transports ask of KV memory beside copies and hashes.
#[test]
fn kv_memory_is_bound_settled_and_flushed() {
    let Some(_turn) = turn() else { return };
    let (context, stream) = (context(), Stream::new(&context()).expect("made"));
    let kernels = Kernels::load(&context, &Folders::default()).expect("kernels");
    let memory = CudaMemory::new(&context, &kernels, 8192, 0).expect("room");
    let mut pinned = Pinned::new(&context, 4096).expect("made");
    // SAFETY: nothing is copied yet.
    unsafe { pinned.slice_mut::<u8>(0, 4096) }.fill(7);
    // As a library copies, on a stream that this program does not know.
    memory.arena().upload(4096, &pinned, 0, 4096, &stream).expect("queued");
    memory.settle();
    let mut back = vec![0; 4096];
    memory.read(4096, &mut back);
    assert!(back.iter().all(|byte| *byte == 7), "the copy has not run");
    let other = memory.clone();
    std::thread::spawn(move || other.bind().expect("another thread")).join().expect("no panic");
    // On the emulated device a network card's writes need a flush before each hash.
    let flushes = count(Count::Flushes);
    let mut digests = [0; 2];
    memory.digests(&[Run { at: 0, bytes: 4096 }, Run { at: 4096, bytes: 4096 }], &mut digests);
    assert_eq!(count(Count::Flushes), flushes.map(|flushes| flushes + 1));
    assert_ne!(digests[0], digests[1]);
    assert_eq!(memory.lost(), None);
}

/// More than one launch takes, more rows than it takes, and more than are queued at once; of lengths of all kinds.
#[test]
fn many_pieces_are_hashed_in_their_order() {
    let Some(_turn) = turn() else { return };
    let context = context();
    let kernels = Kernels::load(&context, &Folders::default()).expect("kernels");
    let words = 40_000usize;
    let bytes: Vec<u8> =
        (0..words as u64).flat_map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    let memory = CudaMemory::new(&context, &kernels, bytes.len(), 0).expect("room");
    memory.write(0, &bytes);
    let word = |at: usize| Run { at: 8 * at, bytes: 8 };
    let leaves = (0..bytes.len() / 4096).map(|leaf| Run { at: 4096 * leaf, bytes: 4096 });
    let lists: [Vec<Run>; 5] = [
        vec![],
        leaves.clone().collect(),
        // One row, of three turns.
        (0..words).map(word).collect(),
        // A row each, of several turns of rows and more than are queued at once.
        (0..9000).map(|at| word(at * 7919 % words)).collect(),
        leaves
            .clone()
            .chain((0..20_000).rev().map(word))
            .chain(leaves.rev())
            .chain((0..66_000).map(|at| word(at % words)))
            .collect(),
    ];
    for pieces in lists {
        let mut digests = vec![0; pieces.len()];
        memory.digests(&pieces, &mut digests);
        for (piece, digest) in pieces.into_iter().zip(digests) {
            assert_eq!(digest, xxh3_64(&bytes[piece.at..][..piece.bytes]), "{piece:?}");
        }
    }
}

#[test]
#[should_panic(expected = "out of range")]
fn a_copy_past_the_end_is_a_bug() {
    let Some(_turn) = turn() else { panic!("out of range, if there were a device") };
    let context = context();
    let (stream, pinned) = (Stream::new(&context).expect("made"), Pinned::new(&context, 64).expect("made"));
    let buffer = Buffer::new(&context, "a test", 64).expect("room");
    let _ = buffer.upload(32, &pinned, 0, 33, &stream);
}

#[test]
fn a_graph_repeats_what_was_recorded() {
    let Some(_turn) = turn() else { return };
    let (context, before) = (context(), alive());
    let stream = Stream::new(&context).expect("made");
    let (mut there, back) = (Pinned::new(&context, 64).expect("made"), Pinned::new(&context, 64).expect("made"));
    let buffer = Buffer::new(&context, "a test", 64).expect("room");
    let mut graph = Graph::capture(&stream, || {
        buffer.upload(0, &there, 0, 64, &stream)?;
        buffer.download(0, &back, 0, 64, &stream)
    })
    .expect("recorded");
    for value in [3u32, 5] {
        // SAFETY: the launch before has ended.
        unsafe { there.slice_mut::<u32>(0, 16) }.fill(value);
        graph.launch(&stream).expect("queued");
        stream.synchronize().expect("done");
        // SAFETY: as above.
        assert_eq!(unsafe { back.slice::<u32>(0, 16) }, [value; 16]);
    }
    // Work that fails leaves a stream that can go on.
    let refused = Graph::capture(&stream, || Err(CudaError::Kernels("no".into())));
    assert!(matches!(refused, Err(CudaError::Kernels(why)) if why == "no"));
    for fault in [Fault::Capture, Fault::Instantiate] {
        if fail(fault) {
            let refused = Graph::capture(&stream, || buffer.upload(0, &there, 0, 64, &stream));
            let error = refused.map(drop).expect_err("planned");
            assert!(!error.is_lost(), "{error}");
        }
    }
    graph.launch(&stream).and_then(|()| stream.synchronize()).expect("goes on");
    drop((graph, there, back, buffer, stream));
    assert_eq!(alive(), before);
}

#[test]
fn kernels_are_compiled_once_and_again_where_the_file_is_of_no_use() {
    let Some(_turn) = turn() else { return };
    let (context, before) = (context(), alive());
    let folder = tempfile::tempdir().expect("a folder");
    let compiled = || seen(Fault::Compile).unwrap_or(0);
    let load = |cache: Option<&Path>| compile::module(&context, rows_source(), &Folders::cache(cache)).map(drop);
    let kept = || {
        let entries = std::fs::read_dir(folder.path()).expect("a folder").map(|entry| entry.expect("an entry").path());
        let [path] = &entries.collect::<Vec<_>>()[..] else { panic!("one file") };
        path.clone()
    };
    let start = compiled();
    load(Some(folder.path())).expect("loads");
    load(Some(folder.path())).expect("loads");
    if alive().is_none() {
        return;
    }
    assert_eq!(compiled() - start, 1, "the second one was kept");
    std::fs::write(kept(), b"half of it").expect("written");
    load(Some(folder.path())).expect("loads");
    assert_eq!(compiled() - start, 2, "what is damaged is compiled again");
    assert!(fail(Fault::Module));
    load(Some(folder.path())).expect("loads");
    assert_eq!(compiled() - start, 3, "and what the driver does not take");
    assert!(fail(Fault::Compile));
    let why = load(None).expect_err("planned").to_string();
    assert!(why.contains("rows.cu"), "{why}");
    assert!(fail(Fault::Module));
    assert!(load(None).is_err());
    assert_eq!(alive(), before);
}

#[test]
fn kernels_that_were_compiled_ahead_are_not_compiled_again() {
    let Some(_turn) = turn() else { return };
    let (context, folder) = (context(), tempfile::tempdir().expect("a folder"));
    let written = compile::ahead(&context.device().arch(), folder.path()).expect("compiles");
    assert!(written.len() == SOURCES.len() && written.iter().all(|path| path.is_file()), "{written:?}");
    let start = seen(Fault::Compile);
    let folders = Folders { cache: None, ahead: Some(folder.path().to_owned()) };
    Kernels::load(&context, &folders).expect("loads");
    assert_eq!(seen(Fault::Compile), start);
    compile::ahead("sm_80", Path::new("/dev/null")).expect_err("no folder");
}

#[test]
fn launches_are_checked_against_the_kernel() {
    let Some(_turn) = turn() else { return };
    let (context, before) = (context(), alive());
    let module = compile::module(&context, rows_source(), &Folders::default()).expect("loads");
    let stream = Stream::new(&context).expect("made");
    let why = module.function("not_there").map(drop).expect_err("none").to_string();
    assert!(why.contains("not_there"), "{why}");
    let hidden = Buffer::new(&context, "a test", 8 * 4).expect("room");
    // 1.0 and 2.0 in bf16.
    let table = Buffer::holding(&context, "a test", &[[0x3f80u16; 8], [0x4000; 8]]).expect("room");
    let tokens = Buffer::holding(&context, "a test", &[1u32]).expect("room");
    let launch = |tokens: Mem| {
        let (hidden, table) = (hidden.mem(), table.mem());
        embed(&Embed { hidden, table, tokens, last: None, rows: 1, width: 8, vocabulary: 2 })
    };
    let embedding = module.function("embed").expect("there");
    let good = launch(tokens.mem()).expect("fits");
    // SAFETY: the memory is as large as the launch says, and waited for.
    unsafe { embedding.launch(&stream, &good) }.expect("queued");
    stream.synchronize().expect("done");
    let mut out = [0.0f32; 8];
    hidden.read(0, &mut out).expect("reads");
    assert_eq!(out, [2.0; 8]);
    assert!(launch(Mem::new(tokens.mem().address, 3)).is_err(), "too small");
    // Another kernel's arguments.
    let norm = module.function("rms_norm").expect("there");
    // SAFETY: refused before it is queued.
    let refused = unsafe { norm.launch(&stream, &good) };
    assert!(matches!(refused, Err(CudaError::Kernels(_))), "{refused:?}");
    if fail(Fault::Submit) {
        // SAFETY: as above.
        let refused = unsafe { embedding.launch(&stream, &good) };
        assert!(refused.is_err_and(|error| !error.is_lost()));
        // SAFETY: as above.
        unsafe { embedding.launch(&stream, &good) }.expect("the next one runs");
        stream.synchronize().expect("done");
    }
    // Numbers that neither this version nor the driver itself has a name for; of the second nobody can say more.
    for (status, lost) in [(4242, false), (777, true)] {
        if set(Setting::SubmitStatus(status)) && fail(Fault::Submit) {
            // SAFETY: as above.
            let error = unsafe { embedding.launch(&stream, &good) }.expect_err("planned");
            assert_eq!(
                (error.is_lost(), error.to_string().contains(&format!("status {status}"))),
                (lost, true),
                "{error}"
            );
        }
    }
    set(Setting::SubmitStatus(701));
    assert!(Module::load(&context, b"").is_err());
    drop((embedding, norm, module, hidden, table, tokens, stream));
    assert_eq!(alive(), before);
}

#[test]
fn a_failed_allocation_leaves_nothing() {
    let Some(_turn) = turn() else { return };
    let (context, before) = (context(), alive());
    if fail(Fault::Alloc) {
        assert!(matches!(Buffer::new(&context, "a test", 64), Err(CudaError::OutOfMemory { .. })));
    }
    if fail(Fault::HostAlloc) {
        assert!(Pinned::new(&context, 64).is_err_and(|error| !error.is_lost()));
    }
    assert_eq!(alive(), before);
    Buffer::new(&context, "a test", 64).expect("the next one is there");
}
