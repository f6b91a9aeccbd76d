//! Disaggregated = single node, for as many random prompts as one likes:
//! `cargo run --release -p tandem-cluster-tests --example equivalence -- --prompts 200 --transport ucx`
use clap::Parser;
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::equivalence::{self, Subject};
use tandem_cluster_tests::{Cluster, Options, Pair};

#[derive(Parser)]
struct Args {
    /// How many prompts
    #[arg(long, default_value_t = 200)]
    prompts: usize,
    /// KV transport; over mem both nodes run in this process
    #[arg(long, default_value = "ucx", value_parser = ["ucx", "tcp", "mem"])]
    transport: String,
    /// KV data type
    #[arg(long, default_value = "bf16", value_parser = ["bf16", "int8", "f32"])]
    kv_dtype: String,
    /// Tokens of a KV block
    #[arg(long, default_value_t = 16)]
    block_size: usize,
    /// Names the series
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let Args { prompts, transport, kv_dtype, block_size, seed } = Args::parse();
    let kv = format!("--kv-dtype {kv_dtype} --block-size {block_size}");
    if transport == "mem" {
        let pair = Pair::start(&format!("--threads 1 --kv-blocks 1024 {kv}")).await?;
        println!("transport mem");
        return compare(&pair, prompts, seed).await;
    }
    let mut options = Options { transport: if transport == "tcp" { "tcp" } else { "ucx" }, ..Options::default() };
    options.node_args.extend(words(&kv));
    let cluster = Cluster::start(options).await?;
    println!("transport {}", cluster.decode.ready("transport"));
    compare(&cluster, prompts, seed).await
}

async fn compare(subject: &impl Subject, prompts: usize, seed: u64) -> anyhow::Result<()> {
    const PART: usize = 10;
    for done in (0..prompts).step_by(PART) {
        let part = PART.min(prompts - done);
        equivalence::compare(subject, part, seed + done as u64).await?;
        println!("{} of {prompts} prompts equal", done + part);
    }
    Ok(())
}
