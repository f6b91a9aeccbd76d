//! The one door through which text from outside enters a page.

/// Safe inside elements and quoted attributes, in HTML and in SVG. Characters that XML forbids become the replacement
/// character.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(' '),
            control if control.is_control() => out.push('\u{fffd}'),
            plain => out.push(plain),
        }
    }
    out
}

/// The first tag that does not fit, or None: enough of a parser for what this module writes.
#[cfg(test)]
pub fn unbalanced(page: &str) -> Option<String> {
    const VOID: [&str; 2] = ["meta", "!doctype"];
    let mut open: Vec<&str> = Vec::new();
    for piece in page.split('<').skip(1) {
        let Some((tag, after)) = piece.split_once('>') else { return Some(format!("<{piece} is not closed")) };
        if tag.matches('"').count() % 2 == 1 {
            return Some(format!("a broken attribute in <{tag}>"));
        }
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap_or_default();
        if tag.starts_with('/') {
            if open.pop() != Some(name) {
                return Some(format!("</{name}> closes something else"));
            }
        } else if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name);
        }
        if after.contains('>') && open.last() != Some(&"style") {
            return Some(format!("a bare > after <{tag}>"));
        }
    }
    open.pop().map(|name| format!("<{name}> stays open"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_gets_out() {
        assert_eq!(
            escape("<script>alert(\"1\" & '2')</script>"),
            "&lt;script&gt;alert(&quot;1&quot; &amp; &#39;2&#39;)&lt;/script&gt;"
        );
        assert_eq!(escape("a\u{0}b\nc\u{1b}é"), "a\u{fffd}b c\u{fffd}é");
    }

    #[test]
    fn the_check_sees_what_is_wrong() {
        assert_eq!(unbalanced("<!doctype html><meta charset=\"x\"><p>a<br/></p>"), None);
        for wrong in ["<p>", "<p></b>", "<p", "<p>a > b</p>", "<p class=\"></p>"] {
            assert!(unbalanced(wrong).is_some(), "{wrong}");
        }
    }
}
