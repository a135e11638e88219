// Questions to the server, and its stream of news, which goes on by itself after the server was away.

export async function get(path, query, signal) {
	const asked = new URLSearchParams();
	for (const [key, value] of Object.entries(query ?? {})) if (value != null && value !== "") asked.set(key, value);
	const text = asked.toString();
	const answer = await fetch(`api/${path}${text ? `?${text}` : ""}`, { signal, cache: "no-store" });
	const content = await answer.json().catch(() => null);
	if (!answer.ok) throw Object.assign(new Error(content?.error ?? `${answer.status} ${answer.statusText}`), { status: answer.status });
	return content;
}

/** Whatever stands in live.json. */
export const liveRanks = (live) => (Array.isArray(live?.ranks) ? live.ranks.filter(Boolean) : []);

/** Calls `heard(kind, value)` for runs, run, gone and reset, and `state("open" | "away" | "refused", seconds)`. */
export class Stream {
	constructor(heard, state) {
		Object.assign(this, { heard, state, tries: 0, source: null, timer: 0, last: "" });
		this.open();
		addEventListener("online", () => this.again(0));
	}

	open() {
		this.source?.close();
		const source = this.source = new EventSource(`api/stream${this.last && `?since=${this.last}`}`);
		source.onopen = () => { this.tries = 0; this.state("open", 0); };
		source.onerror = () => { source.close(); this.again(Math.min(10, 2 ** this.tries++)); };
		for (const kind of ["hello", "runs", "run", "gone"]) {
			source.addEventListener(kind, (event) => {
				const value = JSON.parse(event.data);
				// What was missed while the page was away comes by itself, or has to be asked for.
				const isLost = kind === "hello" && (value.reset || !this.last);
				this.last = event.lastEventId;
				if (kind !== "hello") this.heard(kind, value); else if (isLost) this.heard("reset", value);
			});
		}
	}

	again(seconds) {
		clearTimeout(this.timer);
		this.state("away", seconds);
		this.timer = setTimeout(async () => {
			// EventSource does not say why it was refused.
			const status = await fetch("api/runs", { method: "GET", cache: "no-store" }).then((answer) => answer.status, () => 0);
			if (status === 401 || status === 403) this.state("refused", 0);
			else if (status === 200) this.open();
			else this.again(Math.min(10, 2 ** this.tries++));
		}, seconds * 1000);
	}
}
