// The settings form -> a request's fields.  Empty means the server's default; ranges are the server's to check, which
// names them when it refuses.

const NUMBERS = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "max_tokens",
  "presence_penalty",
  "frequency_penalty",
  "repetition_penalty",
];

export class Settings {
  constructor(page) {
    this.page = page;
  }

  get key() {
    return this.page("key").value.trim();
  }

  /** The request as JSON text.  Throws an Error that names the setting. */
  request(messages) {
    const system = this.page("system").value;
    const first = system.trim() ? [{ role: "system", content: system }] : [];
    const body = { messages: [...first, ...messages], stream: true, stream_options: { include_usage: true } };
    for (const name of NUMBERS) {
      const input = this.page(name);
      if (input.validity.badInput) throw this.wrong(input, "a number");
      if (input.value !== "") body[name] = Number(input.value);
    }
    const stops = this.page("stops").value.split("\n").filter(Boolean);
    if (stops.length) body.stop = stops.map((text) => text.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
    return this.withSeed(JSON.stringify(body));
  }

  /** A seed has 64 bits, more than a number here can hold: it goes into the JSON as it was typed. */
  withSeed(json) {
    const seed = this.page("seed").value.trim();
    if (seed === "") return json;
    if (!/^-?\d{1,20}$/.test(seed)) throw this.wrong(this.page("seed"), "a whole number");
    return `${json.slice(0, -1)},"seed":${BigInt(seed)}}`;
  }

  wrong(input, what) {
    return new Error(`${input.labels[0].textContent} must be ${what}.`);
  }
}
