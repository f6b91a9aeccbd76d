//! A step's progress as a sequence hears of it: which layers, when, and that their KV is final by then.
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use tandem_engine::{
    Batch, Chosen, Engine, EngineError, EngineSpec, Executor, LayersDone, SchedulerConfig, Seq, SequenceEvent,
    SequenceRequest, SimulatedConfig, SimulatedExecutor,
};
use tandem_memory::KvMemory;

use crate::support::{LIMITS, prompt, request, within};

const LAYERS: usize = 4;

/// The words of an arena after so many layers of a step.
type Pictures = Arc<Mutex<Vec<(usize, Vec<u64>)>>>;

/// Takes a picture of the arena whenever a layer is done that somebody waits for, before they receive it.
struct Photographed {
    inner: SimulatedExecutor,
    pictures: Pictures,
}

impl Photographed {
    fn engine(config: SchedulerConfig) -> (Engine, Pictures) {
        let model = SimulatedConfig { blocks: 16, layers: LAYERS, ..SimulatedConfig::default() };
        let inner = SimulatedExecutor::new(&model).expect("a valid configuration");
        let pictures = Pictures::default();
        (Engine::start(Box::new(Self { inner, pictures: Arc::clone(&pictures) }), config), pictures)
    }
}

impl Executor for Photographed {
    fn spec(&self) -> &EngineSpec {
        self.inner.spec()
    }

    fn memory(&self) -> Arc<dyn KvMemory> {
        self.inner.memory()
    }

    fn begin(&mut self, batch: &Batch) -> Result<(), EngineError> {
        self.inner.begin(batch)
    }

    fn finish(&mut self, layers_done: &mut LayersDone<'_>) -> Result<&[Chosen], EngineError> {
        let (memory, pictures) = (self.memory(), Arc::clone(&self.pictures));
        self.inner.finish(&mut |layers| {
            let words = memory.place().host().into_iter().flatten().map(|word| word.load(Relaxed)).collect();
            pictures.lock().expect("no panic").push((layers, words));
            layers_done(layers);
        })
    }

    fn forget(&mut self, seq: Seq) {
        self.inner.forget(seq);
    }
}

/// A short name for each event, in order.
async fn story(engine: &Engine, request: SequenceRequest) -> Vec<String> {
    let mut stream = engine.submit(request).expect("a valid request");
    let mut story = Vec::new();
    while let Some(event) = within(stream.next()).await {
        story.push(match event {
            SequenceEvent::Started { .. } => "started".into(),
            SequenceEvent::ChunkDone { tokens, .. } => format!("chunk {tokens}"),
            SequenceEvent::LayersDone { layers, .. } => format!("layers {layers}"),
            SequenceEvent::Token { .. } => "token".into(),
            SequenceEvent::Preempted { .. } | SequenceEvent::Resumed { .. } => panic!("there is room for all"),
            SequenceEvent::Finished { .. } => "finished".into(),
            SequenceEvent::Failed(error) => panic!("{error}"),
        });
    }
    story
}

#[tokio::test]
async fn layers_are_told_of_in_the_last_chunk_to_those_who_asked() {
    let (engine, _) = Photographed::engine(SchedulerConfig { max_step_tokens: 32, ..LIMITS });
    let asking = SequenceRequest { report_layers: vec![1, 3, 4], ..request(&engine, prompt(80, 1), 3) };
    let silent = request(&engine, prompt(80, 2), 2);
    let (told, untold) = tokio::join!(story(&engine, asking), story(&engine, silent));
    let chunks = told.iter().filter(|event| event.starts_with("chunk")).count();
    let last = told.iter().position(|event| event == "layers 1").expect("told");
    assert!(chunks > 1 && told[..last].iter().filter(|event| event.starts_with("chunk")).count() == chunks - 1);
    assert_eq!(told[last..], ["layers 1", "layers 3", "layers 4", "chunk 80", "token", "token", "token", "finished"]);
    assert!(untold.iter().all(|event| !event.starts_with("layers")), "{untold:?}");
}

#[tokio::test]
async fn a_prompt_of_one_chunk_and_one_of_one_token_are_told_too() {
    let (engine, _) = Photographed::engine(LIMITS);
    for len in [1, 20] {
        let asking = SequenceRequest { report_layers: vec![2], ..request(&engine, prompt(len, 1), 1) };
        let story = story(&engine, asking).await;
        assert_eq!(story, ["started", "layers 2", &format!("chunk {len}"), "token", "finished"]);
    }
    let too_many = SequenceRequest { report_layers: vec![1; LAYERS + 1], ..request(&engine, prompt(20, 1), 1) };
    let refused = engine.submit(too_many).expect_err("more reports than layers").to_string();
    assert!(refused.contains("5 reports of 4 layers"), "{refused}");
}

#[tokio::test]
async fn the_kv_of_a_layer_is_final_when_it_is_told_of() {
    let (engine, pictures) = Photographed::engine(SchedulerConfig { max_step_tokens: 32, ..LIMITS });
    let asking = SequenceRequest { report_layers: vec![1, 2, 3, 4], ..request(&engine, prompt(75, 3), 1) };
    let lease = Arc::clone(&asking.lease);
    story(&engine, asking).await;
    let (memory, words) = (engine.memory(), engine.spec().block_bytes / 8);
    let end = memory.place().host().expect("main memory");
    let pictures = std::mem::take(&mut *pictures.lock().expect("no panic"));
    assert_eq!(pictures.len(), LAYERS, "of three chunks the last one's");
    for (layers, picture) in &pictures {
        for &block in lease.blocks() {
            let (start, done) = (block as usize * words, words * layers / LAYERS);
            let then = &picture[start..start + done];
            assert!(then.iter().zip(&end[start..]).all(|(then, now)| *then == now.load(Relaxed)), "layer {layers}");
        }
    }
    let (_, first) = &pictures[0];
    let last_block = lease.blocks()[4] as usize * words;
    assert!(
        first[last_block + words / 2..last_block + words].iter().all(|word| *word == 0),
        "layers 3 and 4 came later"
    );
}
