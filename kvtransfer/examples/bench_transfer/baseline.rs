//! What bounds a hand-off: memcpy, a plain socket, UCX's own benchmark.
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Instant;

use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};

/// memcpy between two arrays as large as the arenas.
pub struct Memcpy {
    from: Vec<u8>,
    to: Vec<u8>,
    at: usize,
}

impl Memcpy {
    pub fn new(bytes: usize) -> Self {
        Self { from: noise(bytes, 1), to: noise(bytes, 2), at: 0 }
    }

    /// GB/s of copying `bytes` in pieces of `range_bytes`, going on where the last call ended.
    pub fn copy(&mut self, range_bytes: usize, bytes: usize) -> f64 {
        let start = Instant::now();
        for _ in 0..bytes / range_bytes {
            let at = next(&mut self.at, range_bytes, self.from.len());
            self.to[at..at + range_bytes].copy_from_slice(&self.from[at..at + range_bytes]);
        }
        bytes as f64 / start.elapsed().as_secs_f64() / 1e9
    }
}

/// `write_all` and `read_exact` between two threads over loopback, buffers as the kernel tunes them.
pub struct Sockets {
    from: Vec<u8>,
    socket: TcpStream,
    orders: mpsc::Sender<(usize, usize)>,
    done: mpsc::Receiver<Instant>,
    at: usize,
}

impl Sockets {
    pub fn new(bytes: usize) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let socket = TcpStream::connect(listener.local_addr()?)?;
        socket.set_nodelay(true)?;
        let (mut reading, _) = listener.accept()?;
        let (orders, order) = mpsc::channel();
        let (finished, done) = mpsc::channel();
        std::thread::spawn(move || {
            let (mut to, mut at) = (noise(bytes, 2), 0);
            while let Ok((range_bytes, ranges)) = order.recv() {
                for _ in 0..ranges {
                    let at = next(&mut at, range_bytes, to.len());
                    reading.read_exact(&mut to[at..at + range_bytes])?;
                }
                let _ = finished.send(Instant::now());
            }
            std::io::Result::Ok(())
        });
        Ok(Self { from: noise(bytes, 1), socket, orders, done, at: 0 })
    }

    /// GB/s of sending `bytes` in pieces of `range_bytes`, until the last is read.
    pub fn stream(&mut self, range_bytes: usize, bytes: usize) -> anyhow::Result<f64> {
        let ranges = bytes / range_bytes;
        self.orders.send((range_bytes, ranges))?;
        let start = Instant::now();
        for _ in 0..ranges {
            let at = next(&mut self.at, range_bytes, self.from.len());
            self.socket.write_all(&self.from[at..at + range_bytes])?;
        }
        let end = self.done.recv()?;
        Ok(bytes as f64 / end.duration_since(start).as_secs_f64() / 1e9)
    }
}

/// GB/s of `ucx_perftest -t ucp_am_bw` over shared memory; `None` when it is not installed.
pub fn perftest(range_bytes: usize) -> anyhow::Result<Option<f64>> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let iterations = ((1 << 30) / range_bytes).clamp(100, 10_000);
    let run = |server: Option<&str>| {
        let mut command = Command::new("ucx_perftest");
        command.args(server).args(["-t", "ucp_am_bw", "-f", "-p", &port.to_string()]);
        command.args(["-s", &range_bytes.to_string(), "-n", &iterations.to_string(), "-w", "20"]);
        command.env("UCX_TLS", "posix,sysv,self").env("UCX_HANDLE_ERRORS", "none");
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

/// Advances a position by one range, around the end.
fn next(at: &mut usize, range_bytes: usize, len: usize) -> usize {
    let here = if *at + range_bytes > len { 0 } else { *at };
    *at = here + range_bytes;
    here
}
