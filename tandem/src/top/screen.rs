//! Draws the cluster on a terminal. Pure: the model and the keys that were pressed go in, a frame comes out.
use crossterm::event::KeyCode;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row as TableRow, Table, TableState};

use super::model::{About, Cluster, Model, Node, Row};
use crate::span::Trace;
use crate::waterfall;

/// A node that left is shown for so long.
const GONE_MS: u64 = 300_000;
/// Columns of a node's KV bar.
const KV_COLUMNS: usize = 20;
/// Of the longest bar of the tail.
const TAIL_COLUMNS: usize = 50;

/// What the upper part shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Upper {
    #[default]
    Nodes,
    Links,
    Tail,
}

/// Which requests are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Filter {
    #[default]
    All,
    Failed,
    Replanned,
    Local,
}

impl Filter {
    fn next(self) -> Self {
        match self {
            Self::All => Self::Failed,
            Self::Failed => Self::Replanned,
            Self::Replanned => Self::Local,
            Self::Local => Self::All,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Failed => "failed",
            Self::Replanned => "re-planned",
            Self::Local => "local",
        }
    }

    fn takes(self, row: &Row) -> bool {
        match self {
            Self::All => true,
            Self::Failed => is_failed(row),
            Self::Replanned => row.replans > 0,
            Self::Local => row.plan == "local",
        }
    }
}

/// A request that was opened.
struct Opened {
    /// Of its row.
    id: String,
    /// Its client's id.
    request: String,
    /// What was fetched, or why it could not be; until then nothing.
    trace: Option<anyhow::Result<Trace>>,
    scroll: u16,
}

/// What was chosen by keys.
#[derive(Default)]
pub struct Screen {
    upper: Upper,
    /// First line of the upper part.
    scrolled: usize,
    filter: Filter,
    /// Of the request that is chosen; the list moves below it.
    chosen: Option<String>,
    opened: Option<Opened>,
}

impl Screen {
    /// The request that Enter opens.
    pub fn chosen(&self, model: &Model) -> Option<Row> {
        let is_open = self.opened.is_some();
        let chosen = model.rows.iter().find(|row| Some(&row.id) == self.chosen.as_ref());
        chosen.filter(|_| !is_open).cloned()
    }

    /// Shows one request, whose trace is still to come.
    pub fn open(&mut self, row: &Row) {
        self.opened = Some(Opened { id: row.id.clone(), request: row.request.clone(), trace: None, scroll: 0 });
    }

    /// Takes the trace of the row `id`, if that is still what is looked at.
    pub fn fetched(&mut self, id: &str, trace: anyhow::Result<Trace>) {
        if let Some(opened) = self.opened.as_mut().filter(|opened| opened.id == id) {
            opened.trace = Some(trace);
        }
    }

    /// Takes a key.
    pub fn press(&mut self, key: KeyCode, model: &Model) {
        if let Some(opened) = &mut self.opened {
            match key {
                KeyCode::Down | KeyCode::Char('j') => opened.scroll = opened.scroll.saturating_add(1),
                KeyCode::Up | KeyCode::Char('k') => opened.scroll = opened.scroll.saturating_sub(1),
                KeyCode::Esc | KeyCode::Backspace => self.opened = None,
                _ => {}
            }
            return;
        }
        match key {
            KeyCode::Tab => (self.upper, self.scrolled) = (next(self.upper), 0),
            KeyCode::PageDown => self.scrolled = self.scrolled.saturating_add(5),
            KeyCode::PageUp => self.scrolled = self.scrolled.saturating_sub(5),
            KeyCode::Down | KeyCode::Char('j') => self.step(model, 1),
            KeyCode::Up | KeyCode::Char('k') => self.step(model, -1),
            KeyCode::Char('f') => self.filter = self.filter.next(),
            KeyCode::Esc => self.chosen = None,
            _ => {}
        }
    }

    fn step(&mut self, model: &Model, by: isize) {
        let rows = self.rows(model);
        let at = rows.iter().position(|row| Some(&row.id) == self.chosen.as_ref());
        let next = at.map_or(0, |at| at.saturating_add_signed(by)).min(rows.len().saturating_sub(1));
        self.chosen = rows.get(next).map(|row| row.id.clone());
    }

    fn rows<'a>(&self, model: &'a Model) -> Vec<&'a Row> {
        model.rows.iter().filter(|row| self.filter.takes(row)).collect()
    }

    /// The whole terminal.
    pub fn draw(&mut self, frame: &mut Frame, model: &Model) {
        let [head, figures, rest, keys] =
            Layout::vertical([Constraint::Length(1), Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)])
                .areas(frame.area());
        frame.render_widget(title(model), head);
        frame.render_widget(figures_of(&model.cluster()), figures);
        if self.opened.is_some() {
            self.draw_request(frame, rest);
        } else {
            self.draw_lists(frame, rest, model);
        }
        frame.render_widget(Line::from(self.keys()).style(Style::new().add_modifier(Modifier::DIM)), keys);
    }

    fn keys(&self) -> String {
        if self.opened.is_some() {
            return "Esc back   ↑↓ scroll   q quit".to_owned();
        }
        let filter = self.filter.name();
        format!("↑↓ request   Enter open   f filter: {filter}   Tab nodes, links, TTFT   PgUp PgDn scroll   q quit")
    }

    fn draw_lists(&mut self, frame: &mut Frame, area: Rect, model: &Model) {
        let (title, header, widths, rows) = match self.upper {
            Upper::Nodes => nodes(model),
            Upper::Links => links(model),
            Upper::Tail => tail(model),
        };
        let most = area.height / 2;
        let lines = u16::try_from(rows.len()).unwrap_or(u16::MAX).max(1).saturating_add(3).min(most);
        let [upper, lower] = Layout::vertical([Constraint::Length(lines), Constraint::Min(0)]).areas(area);
        self.scrolled = self.scrolled.min(rows.len().saturating_sub(usize::from(lines.saturating_sub(3))));
        let table = Table::new(rows.into_iter().skip(self.scrolled), widths).header(bold(header));
        frame.render_widget(table.block(Block::bordered().title(title)), upper);
        self.draw_requests(frame, lower, model);
    }

    fn draw_requests(&self, frame: &mut Frame, area: Rect, model: &Model) {
        let rows = self.rows(model);
        let chosen = rows.iter().position(|row| Some(&row.id) == self.chosen.as_ref());
        let title = format!(" requests: {} of {}, {} ", rows.len(), model.rows.len(), self.filter.name());
        let header = ["ago", "request", "nodes", "prompt", "output", "TTFT ms", "TPOT ms", "total ms", "outcome"];
        let widths = [
            Constraint::Length(7),
            Constraint::Fill(2),
            Constraint::Fill(2),
            Constraint::Length(7),
            Constraint::Length(7),
            Constraint::Length(9),
            Constraint::Length(9),
            Constraint::Length(9),
            Constraint::Fill(2),
        ];
        let lines = rows.into_iter().map(|row| {
            let number =
                |value: Option<f64>| right(value.map_or_else(|| "–".to_owned(), |value| format!("{value:.2}")));
            let style = if is_failed(row) { Style::new().fg(Color::Red) } else { Style::new() };
            let outcome =
                if row.error.is_empty() { row.outcome.clone() } else { format!("{}: {}", row.outcome, row.error) };
            let ago_s = model.at_ms.saturating_sub(row.at_ms + row.e2e_ms as u64) / 1000;
            TableRow::new([
                right(format!("{ago_s} s")),
                Cell::from(row.request.clone()),
                Cell::from(nodes_of(row)),
                right(row.prompt_tokens.to_string()),
                right(row.output_tokens.to_string()),
                number(row.ttft_ms),
                number(row.tpot_ms),
                number(Some(row.e2e_ms)),
                Cell::from(outcome),
            ])
            .style(style)
        });
        let table = Table::new(lines, widths)
            .header(bold(header.to_vec()))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
            .block(Block::bordered().title(title));
        frame.render_stateful_widget(table, area, &mut TableState::default().with_selected(chosen));
    }

    fn draw_request(&mut self, frame: &mut Frame, area: Rect) {
        let Some(opened) = &mut self.opened else { return };
        let width = usize::from(area.width.saturating_sub(2));
        let text = match &opened.trace {
            None => "asking the router for the trace".to_owned(),
            Some(Ok(trace)) => format!("{}{}", trace.head(), waterfall::render(&trace.spans, width)),
            Some(Err(error)) => format!("the trace cannot be shown: {error:#}"),
        };
        let lines = u16::try_from(text.lines().count()).unwrap_or(u16::MAX);
        opened.scroll = opened.scroll.min(lines.saturating_sub(area.height.saturating_sub(2)));
        let block = Block::bordered().title(format!(" {} ", opened.request));
        frame.render_widget(Paragraph::new(text).scroll((opened.scroll, 0)).block(block), area);
    }
}

fn next(upper: Upper) -> Upper {
    match upper {
        Upper::Nodes => Upper::Links,
        Upper::Links => Upper::Tail,
        Upper::Tail => Upper::Nodes,
    }
}

fn title(model: &Model) -> Line<'static> {
    let (style, state) = match (&model.lost, model.is_begun()) {
        (Some(why), _) => (Style::new().fg(Color::Red), format!("● no connection to the router: {why}; trying again")),
        (None, true) => (Style::new().fg(Color::Green), "● live".to_owned()),
        (None, false) => (Style::new().fg(Color::Yellow), "● connecting".to_owned()),
    };
    let About { model, version } = &model.about;
    let of = if model.is_empty() { String::new() } else { format!("{model}, router {version}  ") };
    let name = Span::styled("tandem top  ", Style::new().add_modifier(Modifier::BOLD));
    Line::from(vec![name, Span::raw(of), Span::styled(state, style)])
}

fn figures_of(cluster: &Cluster) -> Line<'static> {
    let serves = match (cluster.draining, cluster.ready) {
        (true, _) => "draining",
        (false, true) => "serves",
        (false, false) => "no nodes to serve with",
    };
    let kv = cluster.kv_bytes_per_s / 1e6;
    Line::from(format!(
        "{serves}   running {}   queued {}   {:.1} requests/s   {:.1} output tok/s   {:.1} prompt tok/s   KV {kv:.1} MB/s",
        cluster.running,
        cluster.queued,
        cluster.requests_per_s,
        cluster.output_tokens_per_s,
        cluster.prompt_tokens_per_s,
    ))
}

/// Title, header, widths and lines of a table.
type Listed = (String, Vec<&'static str>, Vec<Constraint>, Vec<TableRow<'static>>);

fn nodes(model: &Model) -> Listed {
    let header = vec![
        "node",
        "role",
        "state",
        "KV blocks",
        "",
        "running",
        "waiting",
        "backlog ms",
        "prompt/s",
        "output/s",
        "transport",
    ];
    let mut widths = [14, 8, 9, KV_COLUMNS as u16, 13, 8, 8, 10, 9, 9].map(Constraint::Length).to_vec();
    widths.push(Constraint::Fill(1));
    let nodes = model.nodes();
    let title = format!(" nodes: {} ", nodes.len());
    let gone = model
        .departed
        .iter()
        .filter(|gone| model.at_ms.saturating_sub(gone.at_ms) < GONE_MS && nodes.iter().all(|node| node.id != gone.id));
    let gone = gone.map(|gone| {
        let ago_s = model.at_ms.saturating_sub(gone.at_ms) / 1000;
        let names = [gone.id.clone(), gone.role.clone(), "gone".to_owned()];
        let why = format!("{ago_s} s ago: {}", gone.why);
        // In the last column, which has room.
        let line = names.into_iter().chain(std::iter::repeat_n(String::new(), 7)).chain([why]);
        TableRow::new(line).style(Style::new().fg(Color::Red))
    });
    let lines = nodes.iter().map(node_line).chain(gone).collect();
    (title, header, widths, lines)
}

fn node_line(node: &Node) -> TableRow<'static> {
    let used = node.total_blocks.saturating_sub(node.free_blocks);
    let state = match node.state.as_str() {
        "ready" => Color::Green,
        _ => Color::Yellow,
    };
    TableRow::new([
        Cell::from(node.id.clone()),
        Cell::from(node.role.clone()),
        Cell::from(node.state.clone()).style(Style::new().fg(state)),
        Cell::from(kv_bar(used, node.cached_blocks, node.total_blocks)),
        right(format!("{used}/{}", node.total_blocks)),
        right(node.running.to_string()),
        right(node.waiting.to_string()),
        right(format!("{:.0}", node.backlog_ms)),
        right(format!("{:.1}", node.prompt_tokens_per_s)),
        right(format!("{:.1}", node.output_tokens_per_s)),
        Cell::from(node.transport.clone()),
    ])
}

/// In use, cached, free.
fn kv_bar(used: u64, cached: u64, total: u64) -> Line<'static> {
    let columns = |blocks: u64| {
        let share = blocks as f64 / total.max(1) as f64;
        (share * KV_COLUMNS as f64).round() as usize
    };
    let used = columns(used).min(KV_COLUMNS);
    let cached = columns(cached).min(KV_COLUMNS - used);
    Line::from(vec![
        Span::styled("█".repeat(used), Style::new().fg(Color::Blue)),
        Span::styled("▒".repeat(cached), Style::new().fg(Color::Cyan)),
        Span::styled("·".repeat(KV_COLUMNS - used - cached), Style::new().add_modifier(Modifier::DIM)),
    ])
}

fn links(model: &Model) -> Listed {
    let header = vec!["from", "to", "GB/s", "MB/s now", "hand-offs", "MB moved"];
    let widths = [14, 14, 9, 9, 10, 12].map(Constraint::Length).to_vec();
    let lines = model.links.iter().map(|link| {
        TableRow::new([
            Cell::from(link.prefill.clone()),
            Cell::from(link.decode.clone()),
            right(format!("{:.2}", link.gbps)),
            right(format!("{:.1}", link.bytes_per_s / 1e6)),
            right(link.handoffs.to_string()),
            right(format!("{:.1}", link.bytes as f64 / 1e6)),
        ])
    });
    (" KV links, the busiest first ".into(), header, widths, lines.collect())
}

fn tail(model: &Model) -> Listed {
    let header = vec!["ago", "requests", "p99 ms", "queue", "route", "prefill", ""];
    let mut widths = [7, 9, 10, 10, 10, 10].map(Constraint::Length).to_vec();
    widths.push(Constraint::Fill(1));
    let most = model.tail.iter().map(|stretch| stretch.ttft_ms).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let lines = model.tail.iter().rev().map(|stretch| {
        let parts =
            [(stretch.queue_ms, Color::Yellow), (stretch.route_ms, Color::Cyan), (stretch.prefill_ms, Color::Blue)];
        let bar = parts.map(|(part_ms, color)| {
            let columns = (part_ms / most * TAIL_COLUMNS as f64).round() as usize;
            Span::styled("█".repeat(columns.min(TAIL_COLUMNS)), Style::new().fg(color))
        });
        let ago_s = model.at_ms.saturating_sub(stretch.at_ms) / 1000;
        let mut cells = vec![right(format!("{ago_s} s")), right(stretch.requests.to_string())];
        let numbers = [stretch.ttft_ms, stretch.queue_ms, stretch.route_ms, stretch.prefill_ms];
        cells.extend(numbers.map(|value| right(format!("{value:.2}"))));
        cells.push(Cell::from(Line::from(bar.to_vec())));
        TableRow::new(cells)
    });
    (" TTFT p99 by phase: the request at p99 of ten seconds each ".into(), header, widths, lines.collect())
}

fn nodes_of(row: &Row) -> String {
    match row.plan.as_str() {
        "local" => format!("{} alone", row.decode),
        _ if row.prefill.is_empty() => "–".to_owned(),
        _ => format!("{} → {}", row.prefill, row.decode),
    }
}

fn is_failed(row: &Row) -> bool {
    !row.error.is_empty()
}

fn right(text: String) -> Cell<'static> {
    Cell::from(Line::from(text).right_aligned())
}

fn bold(header: Vec<&'static str>) -> TableRow<'static> {
    TableRow::new(header).style(Style::new().add_modifier(Modifier::BOLD))
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::super::model::tests::{event, whole};
    use super::*;

    fn text(screen: &mut Screen, model: &Model) -> String {
        let mut terminal = Terminal::new(TestBackend::new(150, 30)).unwrap();
        terminal.draw(|frame| screen.draw(frame, model)).unwrap();
        let buffer = terminal.backend().buffer();
        let width = usize::from(buffer.area.width);
        let symbols: Vec<&str> = buffer.content().iter().map(|cell| cell.symbol()).collect();
        symbols.chunks(width).map(|line| line.concat() + "\n").collect()
    }

    fn model() -> Model {
        let mut model = Model::default();
        model.take(whole());
        model
    }

    #[test]
    fn nodes_and_requests_are_shown_with_the_keys() {
        let (mut screen, model) = (Screen::default(), model());
        let shown = text(&mut screen, &model);
        for part in [
            "● live",
            "serves   running 2   queued 1",
            "41.5 output tok/s",
            "decode-0       decode   ready     ███████████████▒▒▒··         48/64",
            "prefill-9      prefill  suspect",
            "10 s ago: it was silent for",
            "prefill-9 → decode-0",
            "Overloaded: too many",
            "requests: 2 of 2, all",
            "q quit",
        ] {
            assert!(shown.contains(part), "no {part:?} in\n{shown}");
        }
        screen.press(KeyCode::Tab, &model);
        assert!(text(&mut screen, &model).contains("3.25       2.0          7"), "{}", text(&mut screen, &model));
        screen.press(KeyCode::Tab, &model);
        assert!(text(&mut screen, &model).contains("40.00      10.00       0.10      29.90"));
        screen.press(KeyCode::Char('f'), &model);
        assert!(text(&mut screen, &model).contains("requests: 1 of 2, failed"));
    }

    #[test]
    fn a_request_stays_chosen_while_the_list_moves_and_opens() {
        let (mut screen, mut model) = (Screen::default(), model());
        assert!(screen.chosen(&model).is_none());
        screen.press(KeyCode::Up, &model);
        screen.press(KeyCode::Down, &model);
        model.take(event(json!({"kind": "delta", "requests": [{"id": "c", "request": "req-c"}]})));
        assert_eq!(screen.chosen(&model).unwrap().request, "req-a");
        (0..9).for_each(|_| screen.press(KeyCode::Up, &model));
        assert_eq!(screen.chosen(&model).unwrap().request, "req-c");

        let trace = json!({"trace_id": "ab", "jaeger": "http://j/trace/ab", "spans": [
            {"name": "chat m", "span_id": "1", "start_unix_ns": 1, "end_unix_ns": 9_000_001}]});
        let row = screen.chosen(&model).unwrap();
        screen.open(&row);
        assert!(text(&mut screen, &model).contains("asking the router"), "keys work meanwhile");
        screen.fetched("a", Err(anyhow::anyhow!("of a row that was left")));
        screen.fetched("c", Ok(serde_json::from_value(trace).unwrap()));
        let shown = text(&mut screen, &model);
        assert!(
            shown.contains("jaeger http://j/trace/ab") && shown.contains("chat m") && shown.contains("Esc back"),
            "{shown}"
        );
        assert!(screen.chosen(&model).is_none(), "Enter has nothing to open here");
        screen.press(KeyCode::Esc, &model);
        screen.open(&row);
        screen.fetched("c", Err(anyhow::anyhow!("no trace")));
        assert!(text(&mut screen, &model).contains("the trace cannot be shown: no trace"));
    }

    #[test]
    fn a_router_that_is_gone_is_said_and_the_last_words_stay() {
        let (mut screen, mut model) = (Screen::default(), Model::default());
        assert!(text(&mut screen, &model).contains("● connecting"));
        model.lost("connection refused".into());
        assert!(text(&mut screen, &model).contains("no connection to the router: connection refused; trying again"));
        model.take(whole());
        model.lost("it ended the stream".into());
        let shown = text(&mut screen, &model);
        assert!(shown.contains("it ended the stream") && shown.contains("decode-0"), "{shown}");
    }

    #[test]
    fn a_small_terminal_is_no_panic() {
        let model = model();
        for (width, height) in [(1, 1), (20, 3), (40, 8), (200, 5)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            for upper in [Upper::Nodes, Upper::Links, Upper::Tail] {
                let mut screen = Screen { upper, ..Screen::default() };
                terminal.draw(|frame| screen.draw(frame, &model)).unwrap();
                screen.open(&model.rows[0]);
                screen.fetched(&model.rows[0].id, Err(anyhow::anyhow!("no")));
                terminal.draw(|frame| screen.draw(frame, &model)).unwrap();
            }
        }
    }
}
