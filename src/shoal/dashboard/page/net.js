// Questions to the server, and its stream of news, which goes on by itself after the server was away.

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export async function get(path, query, signal) {
  const asked = new URLSearchParams();
  for (const [key, value] of Object.entries(query ?? {})) if (value !== null && value !== undefined && value !== "") asked.set(key, value);
  const text = asked.toString();
  const answer = await fetch(`api/${path}${text ? `?${text}` : ""}`, { signal, cache: "no-store" });
  const content = await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(answer.status, content?.error ?? `${answer.status} ${answer.statusText}`);
  return content;
}

/** Calls `heard(kind, value)` for runs, run and gone, and `state("open" | "away" | "refused", seconds)`. */
export class Stream {
  constructor(heard, state) {
    [this.heard, this.state, this.tries, this.source, this.timer] = [heard, state, 0, null, 0];
    this.open();
    addEventListener("online", () => this.again(0));
  }

  open() {
    this.source?.close();
    const source = this.source = new EventSource("api/stream");
    source.onopen = () => { const was = this.tries; this.tries = 0; this.state("open", was); };
    source.onerror = () => { source.close(); this.again(Math.min(10, 2 ** this.tries++)); };
    for (const kind of ["runs", "run", "gone"]) {
      source.addEventListener(kind, (event) => this.heard(kind, JSON.parse(event.data)));
    }
  }

  again(seconds) {
    clearTimeout(this.timer);
    this.state("away", seconds);
    this.timer = setTimeout(async () => {
      // EventSource does not say why it was refused; a plain question does.
      const status = await fetch("api/runs", { method: "GET", cache: "no-store" }).then((answer) => answer.status, () => 0);
      if (status === 401 || status === 403) this.state("refused", 0);
      else if (status === 200) this.open();
      else this.again(Math.min(10, 2 ** this.tries++));
    }, seconds * 1000);
  }
}
