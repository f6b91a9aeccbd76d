//! What bounds a hand-off: memcpy, a plain socket, UCX's own benchmark.
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Instant;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngCore, SeedableRng};

use super::cores::on_core;

/// memcpy between two arrays as large as the arenas, pieces taken from all over them.
pub struct Memcpy {
    from: Vec<u8>,
    to: Vec<u8>,
    rng: SmallRng,
}

impl Memcpy {
    pub fn new(bytes: usize) -> Self {
        Self { from: noise(bytes, 1), to: noise(bytes, 2), rng: SmallRng::seed_from_u64(3) }
    }

    /// GB/s of copying `bytes` in pieces of `range_bytes`.
    pub fn copy(&mut self, range_bytes: usize, bytes: usize) -> f64 {
        let (from, to) = self.pieces(range_bytes, bytes);
        let start = Instant::now();
        for (from, to) in from.into_iter().zip(to) {
            to.copy_from_slice(from);
        }
        bytes as f64 / start.elapsed().as_secs_f64() / 1e9
    }

    /// Random pieces of either array.
    fn pieces(&mut self, range_bytes: usize, bytes: usize) -> (Vec<&[u8]>, Vec<&mut [u8]>) {
        let mut from: Vec<_> = self.from.chunks_exact(range_bytes).collect();
        let mut to: Vec<_> = self.to.chunks_exact_mut(range_bytes).collect();
        from.shuffle(&mut self.rng);
        to.shuffle(&mut self.rng);
        from.truncate(bytes / range_bytes);
        to.truncate(bytes / range_bytes);
        (from, to)
    }
}

/// `write_all` and `read_exact` between two threads over loopback, buffers as the kernel tunes them, pieces taken from
/// all over two arrays as large as the arenas.
pub struct Sockets {
    from: Vec<u8>,
    socket: TcpStream,
    orders: mpsc::Sender<(usize, usize)>,
    done: mpsc::Receiver<Instant>,
    rng: SmallRng,
}

impl Sockets {
    pub fn new(bytes: usize) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let socket = TcpStream::connect(listener.local_addr()?)?;
        socket.set_nodelay(true)?;
        let (mut reading, _) = listener.accept()?;
        let (orders, order) = mpsc::channel();
        let (finished, done) = mpsc::channel();
        let read = move || {
            let (mut to, mut rng) = (noise(bytes, 2), SmallRng::seed_from_u64(4));
            while let Ok((range_bytes, ranges)) = order.recv() {
                let mut pieces: Vec<_> = to.chunks_exact_mut(range_bytes).collect();
                pieces.shuffle(&mut rng);
                for piece in pieces.into_iter().take(ranges) {
                    reading.read_exact(piece)?;
                }
                let _ = finished.send(Instant::now());
            }
            std::io::Result::Ok(())
        };
        on_core(1, || Ok(std::thread::spawn(read)))?;
        Ok(Self { from: noise(bytes, 1), socket, orders, done, rng: SmallRng::seed_from_u64(3) })
    }

    /// GB/s of sending `bytes` in pieces of `range_bytes`, until the last is read.
    pub fn stream(&mut self, range_bytes: usize, bytes: usize) -> anyhow::Result<f64> {
        let ranges = bytes / range_bytes;
        let mut pieces: Vec<_> = self.from.chunks_exact(range_bytes).collect();
        pieces.shuffle(&mut self.rng);
        self.orders.send((range_bytes, ranges))?;
        let start = Instant::now();
        for piece in pieces.into_iter().take(ranges) {
            self.socket.write_all(piece)?;
        }
        let end = self.done.recv()?;
        Ok(bytes as f64 / end.duration_since(start).as_secs_f64() / 1e9)
    }
}

/// GB/s of `messages` active messages of `ucx_perftest` with `settings` (as `UcxConfig::settings` has them); `None`
/// when it is not installed.
pub fn perftest(range_bytes: usize, messages: usize, settings: &[(&str, String)]) -> anyhow::Result<Option<f64>> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let run = |server: Option<&str>| {
        let mut command = Command::new("ucx_perftest");
        command.args(server).args(["-c", if server.is_some() { "0" } else { "1" }]).args([
            "-t",
            "ucp_am_bw",
            "-f",
            "-p",
            &port.to_string(),
        ]);
        command.args(["-s", &range_bytes.to_string(), "-n", &messages.to_string(), "-w", "20"]);
        command.env("UCX_HANDLE_ERRORS", "none").env("UCX_RNDV_THRESH", "0");
        command.envs(settings.iter().map(|(name, value)| (format!("UCX_{name}"), value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
    };
    let Ok(server) = run(None) else { return Ok(None) };
    let _server = Reaped(server);
    // The server says nothing when it is ready: try until the client gets through.
    for _ in 0..200 {
        let output = run(Some("127.0.0.1"))?.wait_with_output()?;
        if let Some(rate) = parse_perftest(&String::from_utf8_lossy(&output.stdout)) {
            return Ok(Some(rate));
        }
    }
    anyhow::bail!("ucx_perftest is installed and measures nothing")
}

/// The last column but two of the last line of numbers: overall MB/s of 2²⁰ bytes.
fn parse_perftest(text: &str) -> Option<f64> {
    let last = text.lines().rev().find(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit()))?;
    let numbers: Vec<f64> = last.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let mib = numbers.len().checked_sub(3).and_then(|at| numbers.get(at))?;
    Some(mib * f64::from(1 << 20) / 1e9)
}

struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut noise = vec![0; bytes];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut noise);
    noise
}
