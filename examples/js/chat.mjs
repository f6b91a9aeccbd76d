// A streamed chat by fetch alone: server-sent events of OpenAI's API.
//
// Usage: node chat.mjs http://HOST:PORT "A question"

const [url, question] = process.argv.slice(2);
const headers = { "content-type": "application/json" };
if (process.env.TANDEM_API_KEY) headers.authorization = `Bearer ${process.env.TANDEM_API_KEY}`;

const models = await (await fetch(`${url}/v1/models`, { headers })).json();
const body = {
  model: models.data[0].id,
  messages: [{ role: "user", content: question }],
  max_tokens: 64,
  temperature: 0,
  stream: true,
  stream_options: { include_timings: true },
};
const answer = await fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body: JSON.stringify(body) });
if (!answer.ok) throw new Error((await answer.json()).error.message);

let [text, timings, done] = ["", undefined, false];
for await (const piece of answer.body.pipeThrough(new TextDecoderStream())) {
  text += piece;
  const events = text.split("\n\n");
  text = events.pop();
  for (const event of events) {
    const data = event.replace(/^data: /, "");
    if (data === "[DONE]") {
      done = true;
      continue;
    }
    const chunk = JSON.parse(data);
    // An error in a stream that has begun is an event, too.
    if (chunk.error) throw new Error(chunk.error.message);
    process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
    timings = chunk.tandem ?? timings;
  }
}
if (!done || !timings) throw new Error("the stream ended early");
console.log(`\nTTFT ${timings.ttft_ms.toFixed(1)} ms, trace ${timings.trace_id}`);
