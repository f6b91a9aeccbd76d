//! Embedding, norm, soundness.
use half::bf16;
use tandem_cuda::kernels::choose::Outcome;
use tandem_cuda::kernels::rows::{CheckRows, Embed, Last, RmsNorm, check_rows, embed, rms_norm};

use crate::gpu::{Gpu, Random};

#[test]
fn tokens_become_rows_of_the_table_given_or_chosen_before() {
    let Some(gpu) = Gpu::get() else { return };
    let (width, vocabulary) = (72, 11);
    let table = Random(1).halves(vocabulary * width);
    let tokens = [3, 10, 0, 5, 7];
    let outcome = |token| {
        let mut outcome = Outcome::default();
        outcome.token = token;
        outcome
    };
    let chosen = gpu.holding(&[outcome(9), outcome(4)]);
    // The last one is beyond what was chosen, the one before no token of the table: both become token 0.
    let from = gpu.holding(&[Last::NOT, 1, Last::NOT, 0, 2]);
    let table_memory = gpu.holding(&table);
    let token_memory = gpu.holding(&tokens);
    for (last, want) in
        [(None, tokens), (Some(Last { from: from.mem(), chosen: chosen.mem(), choices: 2 }), [3, 4, 0, 9, 0])]
    {
        let hidden = gpu.space::<f32>(tokens.len() * width);
        gpu.launch(embed(&Embed {
            hidden: hidden.mem(),
            table: table_memory.mem(),
            tokens: token_memory.mem(),
            last,
            rows: tokens.len(),
            width,
            vocabulary,
        }));
        let rows = want.iter().flat_map(|&token| &table[token as usize * width..][..width]);
        assert_eq!(gpu.read::<f32>(&hidden), rows.map(|value| value.to_f32()).collect::<Vec<_>>());
    }
}

#[test]
fn norms_agree_with_their_formula_for_all_rows_and_for_some() {
    let Some(gpu) = Gpu::get() else { return };
    let (mut random, eps) = (Random(2), 1e-5);
    for width in [8, 64, 576, 2056, 4096] {
        let rows = 4;
        let (hidden, weight) = (random.normals(rows * width), random.normals(width));
        let (hidden_memory, weight_memory) = (gpu.holding(&hidden), gpu.holding(&weight));
        let of = [2u32, 0, 3];
        let of_memory = gpu.holding(&of);
        for (of, list) in [(None, vec![0, 1, 2, 3]), (Some(of_memory.mem()), of.to_vec())] {
            let out = gpu.space::<bf16>(list.len() * width);
            gpu.launch(rms_norm(&RmsNorm {
                out: out.mem(),
                hidden: hidden_memory.mem(),
                weight: weight_memory.mem(),
                of,
                rows: list.len(),
                hidden_rows: rows,
                width,
                eps,
            }));
            let got = gpu.read::<bf16>(&out);
            for (got, &row) in got.chunks(width).zip(&list) {
                let x = &hidden[row as usize * width..][..width];
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
                for ((&got, &x), &weight) in got.iter().zip(x).zip(&weight) {
                    let want = f64::from(x) / (mean + f64::from(eps)).sqrt() * f64::from(weight);
                    // Half a unit in bf16's last place, and what f32 adds.
                    assert!((got.to_f64() - want).abs() <= want.abs() * 0.00392, "{got} {want}, width {width}");
                }
            }
        }
    }
}

#[test]
fn rows_that_are_no_numbers_are_found() {
    let Some(gpu) = Gpu::get() else { return };
    for width in [4, 64, 1028] {
        let mut hidden = Random(3).normals(6 * width);
        hidden[width - 1] = f32::NAN;
        hidden[2 * width] = f32::INFINITY;
        hidden[5 * width + width / 2] = f32::NEG_INFINITY;
        hidden[3 * width] = f32::MAX;
        let (memory, unsound) = (gpu.holding(&hidden), gpu.space::<u32>(6));
        gpu.launch(check_rows(&CheckRows { unsound: unsound.mem(), hidden: memory.mem(), rows: 6, width }));
        assert_eq!(gpu.read::<u32>(&unsound), [1, 0, 1, 0, 0, 1]);
    }
}
