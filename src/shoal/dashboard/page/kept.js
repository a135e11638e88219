// What the browser keeps of the reader's choices; one that keeps nothing forgets them.

export function remember(key, value) {
	try { value === null ? localStorage.removeItem(`shoal.${key}`) : localStorage.setItem(`shoal.${key}`, value); } catch { /* forgotten */ }
}

export function recall(key) {
	try { return localStorage.getItem(`shoal.${key}`); } catch { return null; }
}
