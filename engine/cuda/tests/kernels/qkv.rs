//! From the product of Q, K and V to queries and the arena.
use half::bf16;
use tandem_cuda::kernels::qkv::{Arena, QkvToCache, qkv_to_cache};

use crate::gpu::{Gpu, Random};

const BLOCK_TOKENS: usize = 16;
const EPS: f32 = 1e-6;
/// What no kernel has written.
const UNTOUCHED: bf16 = bf16::from_bits(0x4242);

/// A model's heads, and what it has.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    bias: bool,
    norm: bool,
}

struct Inputs {
    qkv: Vec<f32>,
    bias: Vec<f32>,
    norm: Vec<f32>,
    rotations: Vec<[f32; 2]>,
    positions: Vec<u32>,
    places: Vec<[u32; 2]>,
}

#[test]
fn queries_keys_and_values_are_as_the_formulas_say_and_where_they_belong() {
    let Some(gpu) = Gpu::get() else { return };
    let mut random = Random(4);
    for (heads, kv_heads, head_dim) in [(4, 2, 16), (3, 1, 32), (4, 4, 64), (2, 1, 96), (5, 1, 128), (1, 1, 256)] {
        for (bias, norm) in [(false, false), (true, false), (false, true), (true, true)] {
            let shape = Shape { heads, kv_heads, head_dim, bias, norm };
            let inputs = inputs(&mut random, shape);
            compare(&gpu, shape, &inputs);
        }
    }
}

fn inputs(random: &mut Random, shape: Shape) -> Inputs {
    let (rows, half) = (3, shape.head_dim / 2);
    let width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    let frequency = |pair: usize| 1e4f64.powf(-(pair as f64) / half as f64);
    let turn = |angle: f64| [angle.cos() as f32, angle.sin() as f32];
    let rotations = (0..40).flat_map(|p| (0..half).map(move |pair| turn(f64::from(p) * frequency(pair))));
    Inputs {
        qkv: random.normals(rows * width),
        bias: random.normals(width),
        norm: random.normals((shape.heads + shape.kv_heads) * shape.head_dim),
        rotations: rotations.collect(),
        positions: vec![0, 39, 17],
        places: vec![[2, 0], [0, 15], [1, 1]],
    }
}

fn compare(gpu: &Gpu, shape: Shape, inputs: &Inputs) {
    let Shape { heads, kv_heads, head_dim, bias, norm } = shape;
    let (rows, layers, layer, blocks) = (inputs.positions.len(), 2, 1, 3);
    let mut arena = vec![UNTOUCHED; blocks * layers * 2 * kv_heads * BLOCK_TOKENS * head_dim];
    let memory = gpu.holding(&arena);
    let (qkv, queries) = (gpu.holding(&inputs.qkv), gpu.space::<bf16>(rows * heads * head_dim));
    let (biases, norms) = (gpu.holding(&inputs.bias), gpu.holding(&inputs.norm));
    let (rotations, positions) = (gpu.holding(&inputs.rotations), gpu.holding(&inputs.positions));
    let places = gpu.holding(&inputs.places);
    gpu.launch(qkv_to_cache(&QkvToCache {
        qkv: qkv.mem(),
        queries: queries.mem(),
        arena: Arena { memory: memory.mem(), layers, block_tokens: BLOCK_TOKENS, kv_heads, head_dim },
        layer,
        bias: bias.then(|| biases.mem()),
        head_norm: norm.then(|| norms.mem()),
        eps: EPS,
        rotations: rotations.mem(),
        most_positions: 40,
        positions: positions.mem(),
        places: places.mem(),
        rows,
        heads,
    }));
    let (got_queries, got_arena) = (gpu.read::<bf16>(&queries), gpu.read::<bf16>(&memory));
    for row in 0..rows {
        for head in 0..heads + 2 * kv_heads {
            let want = reference(shape, inputs, row, head);
            let got = if head < heads {
                &got_queries[(row * heads + head) * head_dim..][..head_dim]
            } else {
                let (part, kv_head) = ((head - heads) / kv_heads, (head - heads) % kv_heads);
                let [block, slot] = inputs.places[row].map(|index| index as usize);
                let head = ((block * layers + layer) * 2 + part) * kv_heads + kv_head;
                let at = (head * BLOCK_TOKENS + slot) * head_dim;
                arena[at..at + head_dim].copy_from_slice(&got_arena[at..at + head_dim]);
                &got_arena[at..at + head_dim]
            };
            for (got, want) in got.iter().zip(want) {
                let error = (got.to_f64() - want).abs();
                assert!(error <= want.abs() * 0.00391 + 2e-6, "{got} {want}, row {row}, head {head} of {shape:?}");
            }
        }
    }
    assert_eq!(got_arena, arena, "something else was written");
}

fn reference(shape: Shape, inputs: &Inputs, row: usize, head: usize) -> Vec<f64> {
    let Shape { heads, kv_heads, head_dim, bias, norm } = shape;
    let all = heads + 2 * kv_heads;
    let mut x: Vec<f64> = inputs.qkv[(row * all + head) * head_dim..][..head_dim].iter().map(|&x| x.into()).collect();
    if bias {
        x.iter_mut().zip(&inputs.bias[head * head_dim..]).for_each(|(x, &bias)| *x += f64::from(bias));
    }
    if head >= heads + kv_heads {
        return x;
    }
    if norm {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        x.iter_mut().zip(&inputs.norm[head * head_dim..]).for_each(|(x, &weight)| *x *= scale * f64::from(weight));
    }
    let turns = &inputs.rotations[inputs.positions[row] as usize * head_dim / 2..];
    for (pair, turn) in x.chunks_exact_mut(2).zip(turns) {
        let [cos, sin] = turn.map(f64::from);
        (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos);
    }
    x
}
