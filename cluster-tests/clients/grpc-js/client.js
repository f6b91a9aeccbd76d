// grpc-js and proto-loader, unmodified: stream answers, read timings from the last message and the trailers, and get the
// right codes for a wrong request, a passed deadline and a cancelled call.
//
// Usage: node client.js http://host:port
"use strict";

const assert = require("node:assert");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const PROTO = path.resolve(__dirname, "../../../proto/proto");
const definition = loader.loadSync("tandem/v1/inference.proto", { includeDirs: [PROTO], keepCase: true, longs: Number, defaults: true });
const { Inference } = grpc.loadPackageDefinition(definition).tandem.v1;

/** Everything that a call says: messages, metadata of both ends, status. */
function answer(client, request, options = {}, seen = () => {}) {
  return new Promise((resolve) => {
    const told = { messages: [], metadata: null, status: null };
    const sent = new grpc.Metadata();
    sent.set("x-request-id", "from-js");
    const call = client.Generate(request, sent, { deadline: Date.now() + 60_000, ...options });
    call.on("metadata", (metadata) => (told.metadata = metadata));
    call.on("data", (message) => seen(call, told.messages.push(message)));
    call.on("error", () => {});
    call.on("status", (status) => resolve({ ...told, status }));
  });
}

async function main(url) {
  const client = new Inference(new URL(url).host, grpc.credentials.createInsecure());

  const told = await answer(client, { text: "The capital of France is", max_tokens: 8 });
  assert.strictEqual(told.status.code, grpc.status.OK, told.status.details);
  const finish = told.messages.at(-1).finish;
  const text = told.messages.map((message) => message.token?.text ?? "").join("") + finish.text;
  assert.match(text, /Paris/);
  assert.strictEqual(finish.completion_tokens, told.messages.length - 1);
  assert.strictEqual(told.metadata.get("x-request-id")[0], "from-js");
  assert.match(told.metadata.get("traceparent")[0], new RegExp(finish.trace_id));
  const trailers = told.status.metadata;
  assert.match(trailers.get("server-timing")[0], /^queue;dur=[0-9.]+, route;dur=/);
  assert.ok(Buffer.isBuffer(trailers.get("tandem-timings-bin")[0]));
  console.log("grpc-js: streamed", JSON.stringify(text), trailers.get("server-timing")[0]);

  const several = await answer(client, { text: "Hello", max_tokens: 4, n: 2, ignore_eos: true });
  assert.strictEqual(several.messages.filter((message) => message.finish).length, 2);
  assert.strictEqual(several.status.metadata.get("tandem-timings-bin").length, 2);

  const refused = await answer(client, {});
  assert.strictEqual(refused.status.code, grpc.status.INVALID_ARGUMENT);
  assert.strictEqual(refused.status.metadata.get("x-request-id")[0], "from-js");

  const long = { text: "Hello", max_tokens: 2000, ignore_eos: true };
  const late = await answer(client, long, { deadline: Date.now() + 300 });
  assert.strictEqual(late.status.code, grpc.status.DEADLINE_EXCEEDED);
  const left = await answer(client, long, {}, (call, messages) => messages === 3 && call.cancel());
  assert.strictEqual(left.status.code, grpc.status.CANCELLED);
  client.close();
  console.log("grpc-js: passed");
}

main(process.argv[2]).catch((error) => {
  console.error(error);
  process.exit(1);
});
