"""Wrong readings of protocol.md: a piece of the reference reader, and the code of a mistaken author.

They show that the generated logs (`log_generator`), over which the readers are compared, reveal each of these mistakes.
"""

# Pieces of source, quoted exactly.
# ruff: noqa: E501, ISC004, Q000, Q003

# Section 1: which values are valid.
WRONG_PARSING: dict[str, tuple[str, str]] = {
    "2,049 bytes pass": ("len(value) > 2048", "len(value) > 2049"),
    "2,048 bytes do not pass": ("len(value) > 2048", "len(value) > 2047"),
    "characters are counted, not bytes": (
        "if len(value) > 2048:",
        "if len(value.decode('utf-8', 'replace')) > 2048:",
    ),
    "bytes that are not UTF-8 are replaced": ('value.decode("utf-8")', 'value.decode("utf-8", "replace")'),
    "a byte order mark is dropped": ('value.decode("utf-8")', 'value.decode("utf-8-sig")'),
    "fields too many are ignored": (
        "if len(fields) != 8 + TAIL_FIELDS[kind]:",
        'if len(fields) < 8 + TAIL_FIELDS[kind] or (kind == "GroupSettings" and len(fields) != 12):',
    ),
    "the version is not looked at": ("if number(version, INT64_MAX) is None:", "if False:"),
    "the version must be 1": ("if number(version, INT64_MAX) is None:", 'if version != "1":'),
    "the time is not looked at": ("if number(time, INT64_MAX) is None:", "if False:"),
    "a client may be anything": ("not is_name(instance) or not is_name(client)", "not is_name(instance)"),
    "an instance may be anything": ("not is_name(instance) or not is_name(client)", "not is_name(client)"),
    "a group may be anything": ("or not is_name(group)", ""),
    "names of 256 code points pass": ("1 <= len(text) <= 255", "1 <= len(text) <= 256"),
    "names are counted in bytes": ("1 <= len(text) <= 255", "1 <= len(text.encode()) <= 255"),
    "an empty name passes": ("1 <= len(text) <= 255", "len(text) <= 255"),
    "control characters pass": ('== "Cc"', '== "none"'),
    "only ASCII control characters are refused": (
        'unicodedata.category(character) == "Cc"',
        'character < " " or character == "\\x7f"',
    ),
    "format characters are refused too": ('== "Cc"', 'in {"Cc", "Cf"}'),
    "line separators are refused too": ('== "Cc"', 'in {"Cc", "Zl"}'),
    "unassigned code points are refused too": ('== "Cc"', 'in {"Cc", "Cn"}'),
    "digits of any script pass": (
        "if not consists_of(text, DIGITS):",
        "if not text.isdecimal():",
    ),
    "leading zeros pass": ('text[0] == "0" and text != "0"', "False"),
    "numbers have no limit": ("if result > largest:", "if False:"),
    "the largest number is too large": ("if result > largest:", "if result >= largest:"),
    "a partition may be int64": ("number(topic_partition, INT32_MAX)", "number(topic_partition, INT64_MAX)"),
    "a group's record may name a topic": ('if topic != "":', "if False:"),
    "a group's record may name a partition": ("if partition_number != 0:", "if False:"),
    "a topic may lie anywhere": ("if coordination_partition(topic, coordination_partitions) != partition:", "if False:"),
    "a topic of 250 characters passes": ("1 <= len(text) <= 249", "1 <= len(text) <= 250"),
    "a topic of 249 characters does not": ("1 <= len(text) <= 249", "1 <= len(text) <= 248"),
    "topics of dots pass": ('if text in {".", ".."}:', "if False:"),
    "topics of three dots do not": ('if text in {".", ".."}:', 'if text.strip(".") == "":'),
    "a data topic id of 21 characters passes": ("len(tail[0]) != 22", "len(tail[0]) not in {21, 22}"),
    "a data topic id of 23 characters passes": ("len(tail[0]) != 22", "len(tail[0]) not in {22, 23}"),
    "an interval of 0 passes": ("if heartbeat_interval_ms < 1:", "if False:"),
    "go may have any interval": ('if rules == "go" and heartbeat_interval_ms != 60_000:', "if False:"),
    "any rule set passes": ('if rules not in {"native", "go"}:', "if False:"),
    "any delivery passes": ("if delivery not in DELIVERIES:", "if False:"),
    "features may come twice": ("if name in names:", "if False:"),
    "a feature may have 33 characters": ("len(name) > 32", "len(name) > 33"),
    "a feature may have only 31 characters": ("len(name) > 32", "len(name) > 31"),
    "a feature may begin with a digit": ("name[0] not in LOWER", "name[0] not in LOWER + DIGITS"),
}  # fmt: skip

# Sections 1 to 5 and 7: what valid records do.
WRONG_RULES: dict[str, tuple[str, str]] = {
    "names are stripped": ('"instance": record["instance"]', '"instance": record["instance"].strip()'),
    # 1 and 2, log time
    "log time goes backwards": ('max(log["log_time"], timestamp_ms)', "timestamp_ms"),
    "log time begins at 0": ('"log_time": timestamp_ms,', '"log_time": 0,'),
    # 3
    "live below 2 HI only": ("return bool(age_ms <= 2 *", "return bool(age_ms < 2 *"),
    "live for 1 HI": ("return bool(age_ms <= 2 *", "return bool(age_ms <= 1 *"),
    "the interval is always the one given": (
        '2 * self._settings_of(group)["heartbeat_interval_ms"]',
        "2 * self.heartbeat_interval_ms",
    ),
    "a moved offset leaves the plan open": (
        'if key["offset"] != new_offset:\n        end_plan(key)',
        "",
    ),
    "any commit ends the plan": (
        'if key["offset"] != new_offset:\n        end_plan(key)',
        "end_plan(key)",
    ),
    "attempts outlive the plan": ('key["plan_end"] = None\n    key["plan_attempts"] = 0', 'key["plan_end"] = None'),
    # 4, claims
    "a claim takes from a live owner": (
        "if self._has_live_owner(log, group, key):\n            return False\n        if is_paused",
        "if is_paused",
    ),
    "a duplicate claim is accepted": (
        "if self._has_live_owner(log, group, key):\n            return False\n        if is_paused",
        'if self._has_live_owner(log, group, key) and key["owner"]["instance"] != record["instance"]:\n'
        "            return False\n        if is_paused",
    ),
    "a stale owner cannot claim again": (
        "if self._has_live_owner(log, group, key):\n            return False\n        if is_paused",
        'if self._has_live_owner(log, group, key) or (key["owner"] or {}).get("instance") == record["instance"]:\n'
        "            return False\n        if is_paused",
    ),
    "the pauser may not claim": (
        'if is_paused(log, group) and group["paused_by"] != record["instance"]:',
        "if is_paused(log, group):",
    ),
    "a pause stops no claim": (
        'if is_paused(log, group) and group["paused_by"] != record["instance"]:',
        "if False:",
    ),
    "attempts are counted without a plan": (
        'if key["plan_end"] is not None:\n            key["plan_attempts"]',
        'if True:\n            key["plan_attempts"]',
    ),
    "attempts are not counted": ('key["plan_attempts"] + 1', 'key["plan_attempts"]'),
    # 4, heartbeats
    "a stale owner's heartbeat is refused": (
        'if not is_owner:\n            return False\n        key["owner"]["last_beat"]',
        "if not is_owner or not self._has_live_owner(log, group, key):\n            return False\n"
        '        key["owner"]["last_beat"]',
    ),
    "a lower heartbeat is refused": (
        '        key["owner"]["last_beat"] = log["log_time"]\n        if key["offset"]',
        '        if key["offset"] is not None and record["offset"] < key["offset"]:\n            return False\n'
        '        key["owner"]["last_beat"] = log["log_time"]\n        if key["offset"]',
    ),
    "a paused group's heartbeats are refused": (
        'if not is_owner:\n            return False\n        key["owner"]["last_beat"]',
        "if not is_owner or is_paused(log, group):\n            return False\n        key[\"owner\"][\"last_beat\"]",
    ),
    "a heartbeat brings its client": (
        '        key["owner"]["last_beat"] = log["log_time"]\n        if key["offset"]',
        '        key["owner"]["last_beat"] = log["log_time"]\n        key["owner"]["client"] = record["client"]\n'
        '        if key["offset"]',
    ),
    "a heartbeat lowers the offset": (
        'self._note("rewind")  # a lower one is reported and moves nothing\n',
        'move_offset(key, record["offset"])\n',
    ),
    # 4 and 7, reports
    "a rewind is not reported": ('self._note("rewind")', "pass"),
    "a release elsewhere is not reported": ('self._note("released_elsewhere")', "pass"),
    "a displacement is not reported": ('self._note("displaced")', "pass"),
    "a lowering is not reported": ('self._note("lowered")', "pass"),
    "of a displacement that lowers only that is reported": (
        'if key["offset"] is not None and record["offset"] < key["offset"]:\n                self._note("lowered")',
        'elif key["offset"] is not None and record["offset"] < key["offset"]:\n                self._note("lowered")',
    ),
    "a heartbeat without a plan is not reported": ('self._note("unplanned")', "pass"),
    "each heartbeat that commits is reported": (
        'record["offset"] > key["offset"] and key["plan_end"] is None',
        'record["offset"] > key["offset"]',
    ),
    # 4, releases and revocations
    "a release moves the offset": ('if self._settings_of(group)["rules"] == "go":\n            # 7: a release', "if True:\n            # 7: a release"),
    "a release by anyone": ('if owner["instance"] != record["instance"]:', "if False:"),
    "a release by the pauser sets no position": (
        'if is_paused(log, group) and group["paused_by"] == record["instance"]:\n            # The second',
        "if False:\n            # The second",
    ),
    "a release in any pause sets a position": (
        'if is_paused(log, group) and group["paused_by"] == record["instance"]:\n            # The second',
        "if is_paused(log, group):\n            # The second",
    ),
    "a release after the pause sets a position": (
        'if is_paused(log, group) and group["paused_by"] == record["instance"]:\n            # The second',
        'if group["paused_by"] == record["instance"]:\n            # The second',
    ),
    "a set position counts in no generation": ('end_plan(key)\n            key["generation"] = offset\n            key["ranges"] = []  # R3\n            return True', "end_plan(key)\n            key['ranges'] = []\n            return True"),
    "a set position at the same offset leaves the plan": (
        'key["offset"] = record["offset"]\n            end_plan(key)',
        'move_offset(key, record["offset"])',
    ),
    "a revocation of any epoch": ('if key["owner"]["epoch"] != record["epoch"]:', "if False:"),
    "a revocation of an older epoch": ('["epoch"] != record["epoch"]', '["epoch"] > record["epoch"]'),
    "a stale owner cannot be revoked": (
        'if key["owner"] is None:\n            return False\n        if key["owner"]["epoch"]',
        'if key["owner"] is None or False:\n            return False\n        if key["plan_end"] is not None:\n'
        '            return False\n        if key["owner"]["epoch"]',
    ),
    # 4, plans
    "a stale owner plans": (
        "if not self._has_live_owner(log, group, key):\n            return False\n"
        '        if key["owner"]["instance"] != record["instance"]:\n            return False\n        if is_paused',
        'if key["owner"] is None:\n            return False\n'
        '        if key["owner"]["instance"] != record["instance"]:\n            return False\n        if is_paused',
    ),
    "anyone plans": (
        'if key["owner"]["instance"] != record["instance"]:\n            return False\n        if is_paused',
        "if is_paused",
    ),
    "a paused group plans": ('if is_paused(log, group):\n            return False\n        if key["offset"]', 'if key["offset"]'),
    "the pauser plans": (
        'if is_paused(log, group):\n            return False\n        if key["offset"]',
        'if is_paused(log, group) and group["paused_by"] != record["instance"]:\n            return False\n'
        '        if key["offset"]',
    ),
    "a plan without an offset": (
        'if key["offset"] is None:\n            return False\n        if record["offset"] <= key["offset"]:',
        'if key["offset"] is not None and record["offset"] <= key["offset"]:',
    ),
    "an empty plan": ('if record["offset"] <= key["offset"]:', 'if record["offset"] < key["offset"]:'),
    "an open plan is replaced": (
        'return bool(key["plan_end"] == record["offset"])',
        'key["plan_end"] = record["offset"]\n        return True',
    ),
    "an open plan cannot be repeated": ('return bool(key["plan_end"] == record["offset"])', "return False"),
    "an open plan that is repeated loses its attempts": (
        'return bool(key["plan_end"] == record["offset"])',
        'if key["plan_end"] == record["offset"]:\n            key["plan_attempts"] = 0\n            return True\n'
        "        return False",
    ),
    # 4, pauses
    "paused at the expiry itself": ('log["log_time"] < group["paused_until"]', 'log["log_time"] <= group["paused_until"]'),
    "the longest pause wins": (
        'group["paused_until"] = record["expiry"]\n        group["paused_by"] = record["instance"]\n        return True',
        'group["paused_until"] = max(group["paused_until"] or 0, record["expiry"])\n'
        '        group["paused_by"] = record["instance"]\n        return True',
    ),
    "a pause stays the first one's": (
        'group["paused_by"] = record["instance"]\n        return True',
        'group["paused_by"] = group["paused_by"] or record["instance"]\n        return True',
    ),
    # 4, data topics
    "a data topic from a stale owner": (
        "if not self._has_live_owner(log, group, key):\n            return False\n"
        '        if key["owner"]["instance"] != record["instance"]:\n            return False\n        paused_by',
        'if key["owner"] is None:\n            return False\n'
        '        if key["owner"]["instance"] != record["instance"]:\n            return False\n        paused_by',
    ),
    "a data topic from anyone": (
        'if key["owner"]["instance"] != record["instance"]:\n            return False\n        paused_by',
        "paused_by",
    ),
    "a data topic is replaced without a pause": (
        'if key["data_topic_id"] is not None and not paused_by_sender:',
        "if False:",
    ),
    "the same data topic is always welcome": (
        'if key["data_topic_id"] is not None and not paused_by_sender:',
        'if key["data_topic_id"] not in {None, record["data_topic_id"]} and not paused_by_sender:',
    ),
    "a first data topic only in a pause": (
        'if key["data_topic_id"] is not None and not paused_by_sender:',
        "if not paused_by_sender:",
    ),
    "the same data topic begins a generation": (
        'if key["data_topic_id"] is not None and key["data_topic_id"] != record["data_topic_id"]:',
        'if key["data_topic_id"] is not None:',
    ),
    "a first data topic begins a generation": (
        'if key["data_topic_id"] is not None and key["data_topic_id"] != record["data_topic_id"]:',
        'if key["data_topic_id"] != record["data_topic_id"]:',
    ),
    "another data topic keeps the offset": ('key["offset"] = None\n            end_plan(key)', "end_plan(key)"),
    "another data topic keeps the plan": ('key["offset"] = None\n            end_plan(key)', 'key["offset"] = None'),
    # 4, settings
    "settings over a live owner": (
        "if self._has_live_owner(log, group, key):\n                return False",
        "pass",
    ),
    "settings only while no member owns": (
        "if self._has_live_owner(log, group, key):\n                return False",
        'if key["owner"] is not None:\n                return False',
    ),
    "first settings only in a pause": ('if group["settings"] is not None:\n                return False', "return False"),
    "settings change without a pause": ('if group["settings"] is not None:\n                return False', "pass"),
    "first settings over an open plan": ('if key["plan_end"] is not None:\n                    return False', "pass"),
    "settings of a paused group never over an open plan": (
        "if not paused_by_sender:\n            if group",
        'if any(key["plan_end"] is not None for key in group["keys"].values()):\n            return False\n'
        "        if not paused_by_sender:\n            if group",
    ),
    "settings leave stale owners": ('key["owner"] = None\n            for each in key["ranges"]:', 'for each in key["ranges"]:'),
    "the same delivery begins a generation": ('record["settings"]["delivery"] != delivery_before and ', ""),
    "another delivery begins no generation": (
        'if record["settings"]["delivery"] != delivery_before and key["offset"] is not None:',
        "if False:",
    ),
    "another delivery begins a generation without an offset": (' and key["offset"] is not None:\n                end_plan', ":\n                end_plan"),
    "another rule set or interval begins a generation": (
        'if record["settings"]["delivery"] != delivery_before',
        'if record["settings"] != self._settings_of(new_group())',
    ),
    "delivery at first is effectively once": ('"delivery": "at_least_once"', '"delivery": "effectively_once"'),
    "the rule set is always the one given": ('self._settings_of(group)["rules"] == "go":\n            # 7: from', 'self.rules == "go":\n            # 7: from'),
    "refused records name their group": (
        'if group is None:\n            group = new_group()',
        'if group is None:\n            group = log["groups"].setdefault(record["group"], new_group())',
    ),
    "refused records name their key": (
        "if key is None:\n                key = new_key()",
        'if key is None:\n                key = group["keys"].setdefault((record["topic"], record["partition"]), new_key())',
    ),
    "a mark names its group": (
        "return True  # always accepted, no effect, names nothing",
        'log["groups"].setdefault(record["group"], new_group())\n            return True',
    ),
    "a group is one over all coordination partitions": (
        '"groups": {},',
        '"groups": next((each["groups"] for each in self.logs.values() if not each["observed"]), {}),',
    ),
    # 5
    "a log may begin anywhere": ('"observed": offset > 0', '"observed": False'),
    "an observer drops a lower offset": (
        'key["offset"] = record["offset"]\n        if kind == "DataTopic"',
        'key["offset"] = max(key["offset"] or 0, record["offset"])\n        if kind == "DataTopic"',
    ),
    "an observer takes any release": ('if key["owner"]["instance"] == record["instance"]:\n                key', "if True:\n                key"),
    "an observer takes no offset from a release": ('kind in {"Heartbeat", "ReleasingPartition"}', 'kind == "Heartbeat"'),
    "an observer's owner has an epoch": ('new_owner(record, None, log["log_time"])', 'new_owner(record, log["last_offset"], log["log_time"])'),
    "an observer sees no revocation": ('if kind == "RevokingClaim":\n            key["owner"] = None', ""),
    "an observer names a group by a mark": ('if kind == "Mark":\n            return\n', 'if kind == "Mark":\n            log["groups"].setdefault(record["group"], new_group())\n            return\n'),
    "an observer's owner beats by the record's timestamp, not log time": (
        'log["log_time"] = max(log["log_time"], timestamp_ms)',
        'log["log_time"] = timestamp_ms if log["observed"] else max(log["log_time"], timestamp_ms)',
    ),
    # 7
    "under go a heartbeat never lowers": (
        '            move_offset(key, record["offset"])\n            return True',
        '            if key["offset"] is None or record["offset"] > key["offset"]:\n'
        '                move_offset(key, record["offset"])\n            return True',
    ),
    "under go a heartbeat takes no live claim": (
        "if not is_owner:\n                key",
        "if not is_owner:\n                if self._has_live_owner(log, group, key):\n                    return False\n"
        "                key",
    ),
    "under go each heartbeat is a new epoch": ("if not is_owner:\n                key", "if True:\n                key"),
    "under go a release moves nothing": ('if self._settings_of(group)["rules"] == "go":\n            # 7: a release', "if False:\n            # 7: a release"),
    "under go a release lowers the offset": (
        'if key["offset"] is None or record["offset"] > key["offset"]:\n                move_offset',
        "if True:\n                move_offset",
    ),
}  # fmt: skip

# protocol.md, sections 8.2 and 8.3: what range records do, and what ranges prevent.
WRONG_RANGES: dict[str, tuple[str, str]] = {
    # ClaimingRange
    "ranges need no setting": ("if not self._enables_ranges(group):\n            return False", ""),
    "any feature enables ranges": ('"ranges" in settings["features"]', 'settings["features"] != []'),
    "go with ranges enables them": (' and settings["rules"] == "native"', ""),
    "ranges are claimed in a paused group": (
        'if is_paused(log, group):\n            return False\n        if self._has_live_owner(log, group, key):\n            return False\n        if key["plan_end"]',
        'if self._has_live_owner(log, group, key):\n            return False\n        if key["plan_end"]',
    ),
    "the pausing instance claims ranges": (
        'if is_paused(log, group):\n            return False\n        if self._has_live_owner(log, group, key):\n            return False\n        if key["plan_end"]',
        'if is_paused(log, group) and group["paused_by"] != record["instance"]:\n            return False\n        if self._has_live_owner(log, group, key):\n            return False\n        if key["plan_end"]',
    ),
    "a range beside a live whole owner": (
        'if self._has_live_owner(log, group, key):\n            return False\n        if key["plan_end"] is not None',
        'if key["plan_end"] is not None',
    ),
    "no range beside a stale whole owner": (
        'if self._has_live_owner(log, group, key):\n            return False\n        if key["plan_end"] is not None',
        'if key["owner"] is not None:\n            return False\n        if key["plan_end"] is not None',
    ),
    "a range beside an open plan": ('if key["plan_end"] is not None:\n            return False', ""),
    "a range without an offset": (
        'if key["offset"] is None:\n            return False\n        if key["data_topic_id"] is None',
        'if key["offset"] is None:\n            key["offset"] = 0\n        if key["data_topic_id"] is None',
    ),
    "a range without a data topic id": ('if key["data_topic_id"] is None:\n            return False', ""),
    "a range below the offset": ('if record["start"] < key["offset"]:', 'if record["end"] <= key["offset"]:'),
    "no range at the offset": ('if record["start"] < key["offset"]:', 'if record["start"] <= key["offset"]:'),
    "an empty range": ('if record["start"] >= record["end"]:', 'if record["start"] > record["end"]:'),
    "no range of one offset": ('if record["start"] >= record["end"]:', 'if record["start"] + 1 >= record["end"]:'),
    "ranges that touch overlap": (
        'each["start"] < record["end"] and record["start"] < each["end"]',
        'each["start"] <= record["end"] and record["start"] <= each["end"]',
    ),
    "ranges that share one offset do not overlap": (
        'each["start"] < record["end"] and record["start"] < each["end"]',
        'each["start"] < record["end"] - 1 and record["start"] < each["end"]',
    ),
    "ranges that share their last offset do not overlap": (
        'each["start"] < record["end"] and record["start"] < each["end"]',
        'each["start"] < record["end"] and record["start"] < each["end"] - 1',
    ),
    "a takeover needs only the start": (
        'if each["start"] == record["start"] and each["end"] == record["end"]:',
        'if each["start"] == record["start"]:',
    ),
    "a takeover needs only the end": (
        'if each["start"] == record["start"] and each["end"] == record["end"]:',
        'if each["end"] == record["end"]:',
    ),
    "a live planned range is taken over": ('if each["phase"] == "planned" and not self._is_live(log, group, each["owner"]):', 'if each["phase"] == "planned":'),
    "a planned range is taken over only if it has no owner": ('if each["phase"] == "planned" and not self._is_live(log, group, each["owner"]):', 'if each["phase"] == "planned" and each["owner"] is None:'),
    "a done range is taken over": ('if each["phase"] == "planned" and not self._is_live', 'if each["phase"] != "claimed" and not self._is_live'),
    "a spent range is taken over as it is": ('if each["phase"] == "planned" and not self._is_live', 'if each["phase"] != "done" and not self._is_live'),
    "a spent range is in the way": (
        "if self._is_spent(log, group, each):\n                    continue\n",
        "if False:\n                    continue\n",
    ),
    "a live claimed range is no obstacle": (
        "if self._is_spent(log, group, each):\n                    continue\n",
        'if each["phase"] == "claimed":\n                    continue\n',
    ),
    "255 ranges are the most": ("if count >= MOST_RANGES:", "if count >= MOST_RANGES - 1:"),
    "257 ranges are the most": ("if count >= MOST_RANGES:", "if count > MOST_RANGES:"),
    "spent ranges count": (
        "if self._is_spent(log, group, each):\n                    continue\n                count = count + 1",
        "count = count + 1\n                if self._is_spent(log, group, each):\n                    continue",
    ),
    "the limit holds for a takeover too": (
        'if again is None:\n            # ... or no range',
        'if len(key["ranges"]) >= MOST_RANGES:\n            return False\n        if again is None:\n            # ... or no range',
    ),
    "a claim takes only the spent away that it overlaps": (
        'self._drop_abandoned_claims(log, group, key)\n        key["owner"] = None\n        if again',
        'key["ranges"] = [each for each in key["ranges"] if not self._is_spent(log, group, each) or each["end"] <= record["start"] or each["start"] >= record["end"]]\n        key["owner"] = None\n        if again',
    ),
    "a claim leaves a stale whole owner": (
        'self._drop_abandoned_claims(log, group, key)\n        key["owner"] = None\n        if again',
        "self._drop_abandoned_claims(log, group, key)\n        if again",
    ),
    "a takeover is no attempt": ('again["attempts"] = again["attempts"] + 1', "pass"),
    "a takeover keeps the old epoch": (
        'again["owner"] = new_owner(record, offset, log["log_time"])',
        'again["owner"] = new_owner(record, offset if again["owner"] is None else again["owner"]["epoch"], log["log_time"])',
    ),
    "the first claim is an attempt": ('"phase": "claimed",\n                    "attempts": 0,', '"phase": "claimed",\n                    "attempts": 1,'),
    "a claim is the plan": ('"phase": "claimed",\n                    "attempts": 0,', '"phase": "planned",\n                    "attempts": 0,'),
    # PlanningRange
    "anybody plans a range": (
        'if found["owner"]["instance"] != record["instance"]:\n            return False\n        if not self._is_live(log, group, found["owner"]):',
        'if not self._is_live(log, group, found["owner"]):',
    ),
    "a stale owner plans a range": ('if not self._is_live(log, group, found["owner"]):', "if False:"),
    "a range is planned in a paused group": (
        'if is_paused(log, group):\n            return False\n        if found["phase"] == "planned":',
        'if found["phase"] == "planned":',
    ),
    "a planned range is planned again": ('return bool(found["end"] == record["end"])', "pass"),
    "a plan may not be repeated": ('return bool(found["end"] == record["end"])', "return False"),
    "an empty range is planned": ('if record["end"] <= found["start"]:', 'if record["end"] < found["start"]:'),
    "a plan may reach beyond its range": ('if record["end"] > found["end"]:\n            return False', ""),
    "a plan may not be shorter": ('if record["end"] > found["end"]:', 'if record["end"] != found["end"]:'),
    "a plan may not be the whole range": ('if record["end"] > found["end"]:', 'if record["end"] >= found["end"]:'),
    "a plan never shortens the range": ('found["end"] = record["end"]\n        found["phase"]', 'found["phase"]'),
    # RangeHeartbeat
    "anybody beats for a range": (
        'if found["owner"]["instance"] != record["instance"]:\n            return False\n        found["owner"]["last_beat"]',
        'found["owner"]["last_beat"]',
    ),
    "a range's heartbeat changes nothing": ('found["owner"]["last_beat"] = log["log_time"]', "pass"),
    # RangeDone
    "any member reports that a range is done": (
        'if found["owner"]["instance"] != record["instance"]:\n            return False\n        if found["phase"] != "planned":',
        'if found["phase"] != "planned":',
    ),
    "a range is done without a plan": ('if found["phase"] != "planned":\n            return False', ""),
    "a done range keeps its owner": ('found["phase"] = "done"\n        found["owner"] = None', 'found["phase"] = "done"'),
    "a done range keeps its attempts": ('found["attempts"] = 0  # they', "pass  # they"),
    "done ranges that touch stay apart": ("        join_done(key)\n", ""),
    "done ranges with a gap are one": ('if joined[-1]["end"] == each["start"]:', 'if joined[-1]["end"] + 1 >= each["start"]:'),
    "the offset follows any done range": (
        'if each["phase"] == "done" and each["start"] == key["offset"]:',
        'if each["phase"] == "done":',
    ),
    "the offset follows what is planned": (
        'if each["phase"] == "done" and each["start"] == key["offset"]:',
        'if each["phase"] != "claimed" and each["start"] == key["offset"]:',
    ),
    "a range that the offset has passed stays": ('move_offset(key, each["end"])\n                key["ranges"].remove(each)', 'move_offset(key, each["end"])'),
    # ReleasingRange, RevokingRange, and the range that a record names
    "anybody releases a range": (
        'if found["owner"]["instance"] != record["instance"]:\n            return False\n        give_range_up(key, found)',
        "give_range_up(key, found)",
    ),
    "only the owner revokes a range": (
        "found = range_of(key, record[\"epoch\"])\n        if found is None:\n            return False\n        give_range_up(key, found)\n        return True\n\n    # R2.",
        'found = range_of(key, record["epoch"])\n        if found is None or found["owner"]["instance"] != record["instance"]:\n            return False\n        give_range_up(key, found)\n        return True\n\n    # R2.',
    ),
    "a claimed range stays without an owner": ('if found["phase"] == "claimed":\n        key', 'if False:\n        key'),
    "a planned range goes with its owner": ('if found["phase"] == "claimed":\n        key', 'if True:\n        key'),
    "an epoch matches all before it": ('each["owner"]["epoch"] == epoch', 'each["owner"]["epoch"] >= epoch'),
    # What ranges prevent for other records
    "the partition is claimed whole beside live ranges": (
        'if self._is_live(log, group, each["owner"]):\n                return False\n        sender_paused',
        "pass\n        sender_paused",
    ),
    "the partition is claimed whole beside planned and done ranges": (
        "if not self._is_spent(log, group, each) and not sender_paused:",
        "if False:",
    ),
    "the partition is not claimed whole beside spent ranges": (
        "if not self._is_spent(log, group, each) and not sender_paused:",
        "if not sender_paused:",
    ),
    "not even the pausing instance claims whole beside planned ranges": (
        "if not self._is_spent(log, group, each) and not sender_paused:",
        "if not self._is_spent(log, group, each):",
    ),
    "a whole claim leaves the spent": (
        'self._drop_abandoned_claims(log, group, key)\n        for each in key["ranges"]:\n            each["owner"] = None\n        key["owner"] = new',
        'for each in key["ranges"]:\n            if not self._is_spent(log, group, each):\n                each["owner"] = None\n        key["owner"] = new',
    ),
    "a whole claim leaves the ranges' stale owners": (
        'for each in key["ranges"]:\n            each["owner"] = None\n        key["owner"] = new',
        'key["owner"] = new',
    ),
    "a whole claim drops the ranges": (
        'for each in key["ranges"]:\n            each["owner"] = None\n        key["owner"] = new',
        'key["ranges"] = []\n        key["owner"] = new',
    ),
    "the offset follows the whole owner over ranges": ('if key["ranges"] != []:\n            if record["offset"]', "if False:\n            if record['offset']"),
    "a heartbeat beside ranges is refused": ('return True  # R3: the offset stays', 'return False  # R3: the offset stays'),
    "the whole is planned beside ranges": ('if key["ranges"] != []:\n            return False  # R3: no range is there', ""),
    "a set position leaves the ranges": (
        'key["generation"] = offset\n            key["ranges"] = []  # R3\n            return True',
        'key["generation"] = offset\n            return True',
    ),
    "another data topic leaves the ranges": ('key["ranges"] = []  # R3\n        key["data', 'key["data'),
    "settings change under live ranges": ("return False  # R3: no range is live", "pass"),
    "settings leave the spent": ("self._drop_abandoned_claims(log, group, key)  # R3", "pass"),
    "settings leave the ranges' owners": ('each["owner"] = None  # R3', "pass"),
    "another delivery leaves the ranges": ('key["ranges"] = []  # R3\n            if not self', 'pass\n            if not self'),
    "settings drop the ranges though they enable them": (
        'if not self._enables_ranges(group) and key["ranges"] != []:',
        'if key["ranges"] != []:',
    ),
    "ranges outlive their setting": ('if not self._enables_ranges(group) and key["ranges"] != []:', "if False:"),
    "ranges go with their setting in the same generation": (
        'key["ranges"] = []  # R3: they do not enable ranges, and one is left\n                key["generation"] = offset',
        'key["ranges"] = []',
    ),
    "all keys have a new generation when ranges are switched off": (
        'if not self._enables_ranges(group) and key["ranges"] != []:',
        "if not self._enables_ranges(group):",
    ),
    "a range is live for one interval": (
        'return each["phase"] == "claimed" and not self._is_live(log, group, each["owner"])',
        'return each["phase"] == "claimed" and log["log_time"] - each["owner"]["last_beat"] > self._settings_of(group)["heartbeat_interval_ms"]',
    ),
}  # fmt: skip
