// One prompt over gRPC with grpc-js, tokens as they come, with a deadline.
//
// Usage: node generate.js HOST:PORT "A prompt"
"use strict";

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const PROTO = path.resolve(__dirname, "../../proto/proto");
const definition = loader.loadSync("tandem/v1/inference.proto", { includeDirs: [PROTO], keepCase: true, longs: Number, defaults: true });
const { Inference } = grpc.loadPackageDefinition(definition).tandem.v1;

const [address, prompt] = process.argv.slice(2);
const client = new Inference(address, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
if (process.env.TANDEM_API_KEY) metadata.set("authorization", `Bearer ${process.env.TANDEM_API_KEY}`);

const call = client.Generate({ text: prompt, max_tokens: 16 }, metadata, { deadline: Date.now() + 60_000 });
call.on("data", ({ token, finish }) => {
  process.stdout.write(token?.text ?? finish?.text ?? "");
  if (finish) console.log(`\nTTFT ${finish.timings.ttft_ms.toFixed(1)} ms, trace ${finish.trace_id}`);
});
call.on("error", (error) => {
  // The code says whether a retry makes sense: docs/api.md.
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on("end", () => client.close());
