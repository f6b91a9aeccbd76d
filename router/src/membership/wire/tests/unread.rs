//! What a node may send before it is read.
use super::*;

/// Answers each call's head at once, and then with so many of these messages, as fast as they are taken. Says what the
/// router has let it send of each answer.
fn talkative(mut server: Server, messages: usize, message: Bytes) -> mpsc::UnboundedReceiver<usize> {
    let (told, sent) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok((request, mut respond))) = server.accept().await {
            let (told, message) = (told.clone(), message.clone());
            tokio::spawn(async move {
                let _request = request;
                let mut answer = respond.send_response(Response::new(()), false).unwrap();
                for _ in 0..messages {
                    answer.reserve_capacity(message.len());
                    while answer.capacity() < message.len() {
                        if poll_fn(|context| answer.poll_capacity(context)).await.is_none() {
                            return;
                        }
                    }
                    answer.send_data(message.clone(), false).unwrap();
                    let _ = told.send(message.len());
                }
                answer.send_data(Bytes::new(), true).unwrap();
            });
        }
    });
    sent
}

#[tokio::test(start_paused = true)]
async fn answers_that_nobody_reads_stay_with_the_node_and_hold_up_no_other() {
    const UNREAD: usize = 64;
    let (mut wire, server, _) = connected().await;
    let token = Bytes::from_static(b"a token, as nodes say it");
    let mut sent = talkative(server, 2_000, token.clone());
    let mut unread = Vec::new();
    for _ in 0..UNREAD {
        let (mut request, messages) = request("start");
        request.extensions_mut().insert(Unhurried);
        unread.push((wire.call(request).await.unwrap(), messages));
    }
    let mut bytes = 0;
    while let Ok(Some(more)) = tokio::time::timeout(KEEPALIVE_INTERVAL / 2, sent.recv()).await {
        bytes += more;
    }
    let whole = STREAM_WINDOW as usize / token.len() * token.len();
    assert_eq!(bytes, UNREAD * whole, "each answer up to its window");
    let (request, _messages) = request("start");
    let answer = wire.call(request).await.unwrap().into_body();
    assert_eq!(answer.collect().await.unwrap().to_bytes().len(), 2_000 * token.len());
    for (answer, _messages) in unread {
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes().len(), 2_000 * token.len(), "none broke");
    }
}

#[tokio::test]
async fn a_message_larger_than_the_window_comes_in_pieces() {
    let (mut wire, mut server, _) = connected().await;
    let message = Bytes::from(vec![7; 3 * STREAM_WINDOW as usize]);
    tokio::spawn(async move {
        let (request, mut respond) = accept(&mut server).await;
        let mut answer = respond.send_response(Response::new(()), false).unwrap();
        answer.send_data(message, true).unwrap();
        while server.accept().await.is_some() {}
        drop(request);
    });
    let (request, _messages) = request("start");
    let answer = wire.call(request).await.unwrap().into_body();
    assert_eq!(answer.collect().await.unwrap().to_bytes(), vec![7; 3 * STREAM_WINDOW as usize]);
}
