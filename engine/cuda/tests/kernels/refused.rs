//! Launches that are none: memory that is too small or not aligned, shapes that no kernel takes. No device is needed.
use tandem_cuda::kernels::attention::{Attention, Height, PARTITION, Split, Tile, attention, merge};
use tandem_cuda::kernels::blocks::{CopyBlocks, Xxh3, copy_blocks, xxh3};
use tandem_cuda::kernels::choose::{Choice, Choose, MOST_TOKENS, choose};
use tandem_cuda::kernels::launch::{Launch, Mem, Refused};
use tandem_cuda::kernels::product::{Output, Product, product};
use tandem_cuda::kernels::qkv::Arena;
use tandem_cuda::kernels::rows::{Embed, RmsNorm, embed, rms_norm};
use tandem_engine::SamplingParams;

const LARGE: Mem = Mem::new(0x1000, 1 << 40);

fn refused(launch: Result<Launch, Refused>, why: &str) {
    let refused = launch.expect_err("refused").to_string();
    assert!(refused.contains(why), "{refused}");
}

#[test]
fn memory_is_measured() {
    let small = Mem::new(0x1000, 63);
    let asked = Product { output: Output::Store(LARGE), x: LARGE, weight: LARGE, rows: 1, n: 8, k: 32 };
    assert!(product(&asked, 1).is_ok());
    refused(product(&Product { x: small, ..asked }, 1), "x needs 32 × 2 bytes");
    refused(product(&Product { weight: Mem::default(), ..asked }, 1), "weight needs 256 × 2 bytes");
    refused(product(&Product { weight: Mem::new(0x1008, 1 << 20), ..asked }, 1), "weight at 0x1008 is not aligned");
    refused(product(&Product { n: usize::MAX / 2, ..asked }, 1), "out needs");
    refused(product(&Product { rows: 4, n: usize::MAX / 2, ..asked }, 1), "too much");
    let asked = Xxh3 { digests: Mem::new(0x1000, 8), memory: LARGE, rows: LARGE, row_count: 1, count: 2 };
    refused(xxh3(&asked), "digests needs 2 × 8 bytes");
    refused(xxh3(&Xxh3 { rows: Mem::new(0x1000, 47), row_count: 2, count: 1, ..asked }), "rows needs 6 × 8 bytes");
    refused(xxh3(&Xxh3 { row_count: 0, ..asked }), "no rows");
}

#[test]
fn shapes_are_checked() {
    let asked = Product { output: Output::SwiGlu(LARGE), x: LARGE, weight: LARGE, rows: 1, n: 8, k: 32 };
    refused(product(&Product { k: 48, ..asked }, 1), "k = 48");
    refused(product(&Product { n: 7, ..asked }, 1), "n = 7");
    let norm =
        RmsNorm { out: LARGE, hidden: LARGE, weight: LARGE, of: None, rows: 3, hidden_rows: 2, width: 64, eps: 0.0 };
    refused(rms_norm(&norm), "3 rows of 2");
    refused(rms_norm(&RmsNorm { width: 12, ..norm }), "rows of 12");
    let all = Embed { hidden: LARGE, table: LARGE, tokens: LARGE, last: None, rows: 0, width: 64, vocabulary: 3 };
    assert!(embed(&all).expect("no rows are no error").is_empty());
    refused(copy_blocks(&CopyBlocks { memory: LARGE, pairs: LARGE, count: 1, block_bytes: 24 }), "24 bytes");
    let asked = Choose {
        outcomes: LARGE,
        choices: LARGE,
        count: 1,
        logits: LARGE,
        logits_rows: 1,
        vocabulary: MOST_TOKENS + 1,
        unsound: LARGE,
        rows: 1,
    };
    refused(choose(&asked), "a vocabulary of 262145");
    let penalty = SamplingParams { presence_penalty: 0.5, ..SamplingParams::GREEDY };
    assert_eq!(Choice::new(&penalty, 0.5, 0, 0, 1), None);
}

#[test]
fn heads_and_tiles_are_checked() {
    let arena = Arena { memory: LARGE, layers: 2, block_tokens: 16, kv_heads: 2, head_dim: 64 };
    let asked = Attention {
        queries: LARGE,
        out: LARGE,
        rows: 4,
        arena,
        layer: 1,
        tables: LARGE,
        table_rows: 1,
        table_blocks: 4,
        tiles: LARGE,
        tile_count: 4,
        height: Height::Rows16,
        heads: 8,
        window: None,
        split: None,
    };
    assert!(attention(&asked).is_ok());
    refused(merge(&asked), "nothing is split");
    refused(attention(&Attention { heads: 9, ..asked }), "9 query heads on 2");
    refused(attention(&Attention { heads: 34, ..asked }), "up to 16 may share one");
    refused(attention(&Attention { layer: 2, ..asked }), "layer 2 of 2");
    refused(attention(&Attention { arena: Arena { head_dim: 80, ..arena }, ..asked }), "heads of 80 values");
    refused(attention(&Attention { arena: Arena { block_tokens: 24, ..arena }, ..asked }), "blocks of 24 tokens");
    let split = Split { partials: LARGE, partitions: 3, ways: 2, tokens: 1 };
    let split_asked = Attention { split: Some(split), ..asked };
    assert_eq!(attention(&split_asked).expect("a launch").grid, [4, 2, 2]);
    refused(attention(&Attention { height: Height::Rows128, ..split_asked }), "are not split");
    refused(attention(&Attention { split: Some(Split { ways: 4, ..split }), ..asked }), "4 ways for 3 partitions");
    let partials = Mem::new(0x1000, Split::bytes(4, 8, 1, 3, 64) - 1);
    refused(attention(&Attention { split: Some(Split { partials, ..split }), ..asked }), "partials needs");
    assert_eq!(PARTITION, 256);
}

#[test]
fn tiles_cover_a_chunk() {
    let (mut few, mut many) = (Vec::new(), Vec::new());
    Height::Rows16.cut(3, 7, 11, 2, 100, &mut few);
    Height::Rows128.cut(3, 7, 50, 2, 100, &mut many);
    let tile = |first_row, tokens, start| Tile { first_row, tokens, table: 2, start };
    assert_eq!(few, [tile(7, 5, 100), tile(12, 5, 105), tile(17, 1, 110)]);
    assert_eq!(many, [tile(7, 42, 100), tile(49, 8, 142)]);
}
