"""logs.py - what the members' logs say, by the wall clock: who was lost when, and which requests went on elsewhere."""
import dataclasses, datetime, re

LINE = re.compile(r'^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z) (\w+) \S+ (.*)$')
FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)')
NO_LINK = 'why="connect', 'why="no connection', 'why="no handshake'      # a dial that failed: there was no link to lose


@dataclasses.dataclass
class Line:
    at: float
    text: str

    def fields(self):
        return {k: v.strip('"') for k, v in FIELD.findall(self.text)}


def lines_of(member):
    out = []
    for raw in member.output().splitlines():
        m = LINE.match(raw)
        if m:
            t = datetime.datetime.strptime(m[1], '%Y-%m-%dT%H:%M:%S.%fZ').replace(tzinfo=datetime.timezone.utc).timestamp()
            out.append(Line(t, m[3]))
    return out


class Logs:
    """Read once, when the run is over."""

    def __init__(self, members):
        self.of = {m: lines_of(m) for m in members}

    def losses_of(self, member):
        """{observer: [the lines in which it said that the link to this member was lost]}"""
        name = member.known_as()
        return {m: [l for l in lines if l.text.startswith('peer lost') and f'peer={name} ' in l.text and not any(w in l.text for w in NO_LINK)] for m, lines in self.of.items() if m is not member}

    def is_linked(self, observer, member, at):
        """Whether it had a link to this member then, by what it said last of it."""
        name, up = member.known_as(), False
        for l in self.of[observer]:
            if l.at >= at - 0.05:
                break
            if f'peer={name} ' in l.text and l.text.startswith(('link up', 'peer lost')):
                up = l.text.startswith('link up')
            elif l.text.startswith('node ready'):
                up = False  # another process
        return up

    def moves(self):
        """[(when, entry, name of the request, state, action)] of losses after which a request went on."""
        out = []
        for m, lines in self.of.items():
            for l in lines:
                if l.text.startswith('request loss'):
                    f = l.fields()
                    out.append((l.at, m, f.get('api_request', ''), f.get('state', ''), f.get('action', '')))
        return out

    def count(self, words):
        return sum(words in l.text for lines in self.of.values() for l in lines)
